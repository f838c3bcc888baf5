"""The block index: which ranks hold how many of the leading blocks of a prompt."""
