"""Generated protobuf messages; the sources are in proto/, the generator is proto/generate.py."""
