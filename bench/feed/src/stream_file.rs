//! A stream in a file, for the processes that feed a recorded stream.
//!
//! ```text
//!   magic 8 │ image pages u64 │ seconds u64 │ image
//!   for each second: pages u64 │ their numbers, rising, u64 each │ their contents
//! ```
//!
//! Numbers are little-endian, and pages have 4096 bytes. The file exists during one benchmark only, so
//! its writer and its readers have the same version.
//!
//! Invariants: a length is checked against the file's length before memory is allocated for it. No
//! bytes follow the last second.

use crate::stream::{DirtySecond, Stream};
use crate::{Error, Result};
use keyframe_units::{PAGE_BYTES, Page, PageIndex, ZERO_PAGE};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::Path;

const MAGIC: [u8; 8] = *b"KFSTREAM";

impl Stream {
    /// Writes the stream to the new file `path`.
    pub fn write(&self, path: &Path) -> Result<()> {
        let file = File::create_new(path).map_err(Error::file("make", path))?;
        let mut out = BufWriter::new(file);
        self.write_to(&mut out).and_then(|()| out.flush()).map_err(Error::file("write", path))
    }

    fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()> {
        out.write_all(&MAGIC)?;
        for count in [self.image.len(), self.seconds.len()] {
            out.write_all(&(count as u64).to_le_bytes())?;
        }
        out.write_all(self.image.as_flattened())?;
        for DirtySecond { pages, contents } in &self.seconds {
            out.write_all(&(pages.len() as u64).to_le_bytes())?;
            for page in pages {
                out.write_all(&page.0.to_le_bytes())?;
            }
            out.write_all(contents.as_flattened())?;
        }
        Ok(())
    }

    /// Reads a file of [`Stream::write`].
    pub fn read(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::file("open", path))?;
        let left_bytes = file.metadata().map_err(Error::file("look at", path))?.len();
        let stream = StreamReader { file: BufReader::new(file), left_bytes }.stream();
        stream.map_err(Error::file("read", path))
    }
}

/// Reads a stream from a file.
struct StreamReader {
    file: BufReader<File>,
    left_bytes: u64,
}

impl StreamReader {
    fn stream(&mut self) -> std::io::Result<Stream> {
        let mut magic = [0; MAGIC.len()];
        self.fill(&mut magic)?;
        if magic != MAGIC {
            return Err(invalid("it is no stream of pages"));
        }
        let (image_pages, seconds) = (self.number()?, self.number()?);
        let image = self.pages(image_pages)?;
        // Each second has at least its number of pages.
        self.check_left(seconds, size_of::<u64>())?;
        let mut stream = Stream { image, seconds: Vec::new() };
        for _ in 0..seconds {
            let count = self.number()?;
            let pages = self.numbers(count)?;
            if !pages.is_sorted_by(|a, b| a < b)
                || pages.last().is_some_and(|last| last.0 >= image_pages)
            {
                return Err(invalid(
                    "the pages of a second are out of order, or outside of the image",
                ));
            }
            let contents = self.pages(count)?;
            stream.seconds.push(DirtySecond { pages, contents });
        }
        if self.left_bytes > 0 {
            return Err(invalid("bytes follow the last second"));
        }
        Ok(stream)
    }

    /// Checks that `count` elements of `each_bytes` bytes are left in the file.
    fn check_left(&self, count: u64, each_bytes: usize) -> std::io::Result<usize> {
        let bytes = count.checked_mul(each_bytes as u64);
        match (bytes.is_some_and(|bytes| bytes <= self.left_bytes), usize::try_from(count)) {
            (true, Ok(count)) => Ok(count),
            _ => Err(invalid("it is truncated")),
        }
    }

    fn fill(&mut self, out: &mut [u8]) -> std::io::Result<()> {
        self.check_left(out.len() as u64, 1)?;
        self.file.read_exact(out)?;
        self.left_bytes -= out.len() as u64;
        Ok(())
    }

    fn number(&mut self) -> std::io::Result<u64> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn numbers(&mut self, count: u64) -> std::io::Result<Vec<PageIndex>> {
        let count = self.check_left(count, size_of::<u64>())?;
        (0..count).map(|_| self.number().map(PageIndex)).collect()
    }

    fn pages(&mut self, count: u64) -> std::io::Result<Vec<Page>> {
        let mut pages = vec![ZERO_PAGE; self.check_left(count, PAGE_BYTES)?];
        self.fill(pages.as_flattened_mut())?;
        Ok(pages)
    }
}

fn invalid(problem: &str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ChangedWords;

    #[test]
    fn a_stream_is_read_from_its_file_and_invalid_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stream");
        let stream = Stream::new(512, 2, ChangedWords::Few);
        stream.write(&path).unwrap();
        let back = Stream::read(&path).unwrap();
        assert!(back.image == stream.image && back.seconds.len() == 2);
        let equal =
            |(a, b): (&DirtySecond, &DirtySecond)| a.pages == b.pages && a.contents == b.contents;
        assert!(back.seconds.iter().zip(&stream.seconds).all(equal));
        stream.write(&path).unwrap_err();

        let bytes = std::fs::read(&path).unwrap();
        let second = 24 + 512 * PAGE_BYTES;
        let changed = |at: usize, to: &[u8]| {
            let mut bytes = bytes.clone();
            bytes[at..at + to.len()].copy_from_slice(to);
            bytes
        };
        let longer = [&bytes[..], &[0]].concat();
        for wrong in [
            Vec::new(),
            bytes[..bytes.len() - 1].to_vec(),
            longer,
            changed(0, b"?"),
            changed(8, &u64::MAX.to_le_bytes()),
            changed(16, &u64::MAX.to_le_bytes()),
            changed(second, &u64::MAX.to_le_bytes()),
            changed(second + 8, &512u64.to_le_bytes()),
        ] {
            std::fs::write(&path, wrong).unwrap();
            Stream::read(&path).unwrap_err();
        }
    }
}
