"""HTML reports from values alone, each one file without external scripts, fonts or images."""
