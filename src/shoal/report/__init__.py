"""HTML pages from values alone: one file each, without scripts, fonts or images from elsewhere."""
