"""The commands of `kvsteer`, a module or folder each."""
