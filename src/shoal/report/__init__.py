"""HTML reports from values alone: one file each, without scripts, fonts or images from elsewhere."""
