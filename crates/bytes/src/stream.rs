//! Reads a stream, with bounds.

use std::io::{self, ErrorKind, Read};

/// Bytes that [`StreamReader::bytes`] allocates before the first has arrived.
const FIRST_ALLOCATION_BYTES: u64 = 64 << 10;

/// Reads fields from a stream and counts the bytes.
///
/// A stream that ends inside a field gives [`ErrorKind::UnexpectedEof`]. Wrap a file or socket in
/// [`std::io::BufReader`] first: each field is one read.
#[derive(Debug)]
pub struct StreamReader<R> {
    inner: R,
    position: u64,
}

impl<R: Read> StreamReader<R> {
    /// Starts at the next byte of `inner`.
    pub fn new(inner: R) -> Self {
        Self { inner, position: 0 }
    }

    /// Returns the number of bytes in the fields read so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Returns the stream, placed after the last field read.
    pub fn into_inner(self) -> R {
        self.inner
    }

    /// Returns the stream. Bytes that the caller reads from it are not counted.
    pub fn inner_mut(&mut self) -> &mut R {
        &mut self.inner
    }

    /// Reads exactly as many bytes as `into` has. Errors: those of the stream;
    /// [`ErrorKind::UnexpectedEof`] if it ends inside the field.
    pub fn fill(&mut self, into: &mut [u8]) -> io::Result<()> {
        self.inner.read_exact(into)?;
        self.position += into.len() as u64;
        Ok(())
    }

    /// Reads the next `N` bytes. Errors: those of the stream; [`ErrorKind::UnexpectedEof`] if it
    /// ends inside the field.
    pub fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut out = [0; N];
        self.fill(&mut out)?;
        Ok(out)
    }

    /// Reads the next `len` bytes, and allocates only as they arrive.
    ///
    /// Errors: [`ErrorKind::InvalidData`] if `len` exceeds `max`; those of the stream;
    /// [`ErrorKind::UnexpectedEof`] if it ends inside the field.
    pub fn bytes(&mut self, len: u64, max: u64) -> io::Result<Vec<u8>> {
        if len > max {
            let problem = format!("a field of {len} bytes exceeds the limit of {max}");
            return Err(io::Error::new(ErrorKind::InvalidData, problem));
        }
        let mut out = Vec::with_capacity(len.min(FIRST_ALLOCATION_BYTES) as usize);
        let read = self.inner.by_ref().take(len).read_to_end(&mut out)? as u64;
        if read < len {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.position += len;
        Ok(out)
    }

    /// Reads `len` bytes and drops them. Errors: those of the stream; [`ErrorKind::UnexpectedEof`]
    /// if it ends inside the field.
    pub fn skip(&mut self, len: u64) -> io::Result<()> {
        let skipped = io::copy(&mut self.inner.by_ref().take(len), &mut io::sink())?;
        if skipped < len {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.position += len;
        Ok(())
    }

    /// Reads one byte. Errors: those of the stream; [`ErrorKind::UnexpectedEof`] if it ends inside
    /// the field.
    pub fn u8(&mut self) -> io::Result<u8> {
        self.array().map(u8::from_be_bytes)
    }

    /// Reads a big-endian number of 2 bytes. Errors: those of the stream;
    /// [`ErrorKind::UnexpectedEof`] if it ends inside the field.
    pub fn u16_be(&mut self) -> io::Result<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// Reads a big-endian number of 4 bytes. Errors: those of the stream;
    /// [`ErrorKind::UnexpectedEof`] if it ends inside the field.
    pub fn u32_be(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// Reads a big-endian number of 8 bytes. Errors: those of the stream;
    /// [`ErrorKind::UnexpectedEof`] if it ends inside the field.
    pub fn u64_be(&mut self) -> io::Result<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Reads a little-endian number of 4 bytes. Errors: those of the stream;
    /// [`ErrorKind::UnexpectedEof`] if it ends inside the field.
    pub fn u32_le(&mut self) -> io::Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads a little-endian number of 8 bytes. Errors: those of the stream;
    /// [`ErrorKind::UnexpectedEof`] if it ends inside the field.
    pub fn u64_le(&mut self) -> io::Result<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_and_counted() {
        let bytes = [&[7][..], &2u16.to_be_bytes(), &3u32.to_be_bytes(), &4u64.to_be_bytes()];
        let more = [&5u32.to_le_bytes()[..], &6u64.to_le_bytes(), b"text", &[9; 5]];
        let bytes = [bytes.concat(), more.concat()].concat();
        let mut reader = StreamReader::new(&bytes[..]);
        assert_eq!(reader.u8().unwrap(), 7);
        assert_eq!(reader.u16_be().unwrap(), 2);
        assert_eq!(reader.u32_be().unwrap(), 3);
        assert_eq!(reader.u64_be().unwrap(), 4);
        assert_eq!(reader.u32_le().unwrap(), 5);
        assert_eq!(reader.u64_le().unwrap(), 6);
        assert_eq!(reader.bytes(4, 4).unwrap(), b"text");
        reader.skip(4).unwrap();
        assert_eq!(reader.position(), bytes.len() as u64 - 1);
        assert_eq!(reader.into_inner(), &[9]);
    }

    #[test]
    fn a_short_stream_and_a_long_field_are_errors() {
        let kind = |result: io::Result<()>| result.unwrap_err().kind();
        let reader = || StreamReader::new(&[1u8, 2, 3][..]);
        assert_eq!(kind(reader().u32_be().map(drop)), ErrorKind::UnexpectedEof);
        assert_eq!(kind(reader().skip(4)), ErrorKind::UnexpectedEof);
        assert_eq!(kind(reader().bytes(4, 9).map(drop)), ErrorKind::UnexpectedEof);
        assert_eq!(kind(reader().bytes(1 << 60, 9).map(drop)), ErrorKind::InvalidData);
        let hostile = reader().bytes(1 << 40, u64::MAX);
        assert_eq!(kind(hostile.map(drop)), ErrorKind::UnexpectedEof);
    }
}
