//! Writes a disk back to an image.
