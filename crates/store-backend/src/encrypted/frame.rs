//! The format of an encrypted file: frames in blocks.
//!
//! ```text
//!   file    | header 32 | frame | frame | ... | frame |00| frame | frame | ...
//!           |<--------------- block, 65536 ------------->|<------ block ------
//!
//!   header   0 8 magic "KF:ENC\r\n"  8 4 kind: 1 whole, 2 growing  12 4 zero  16 16 random salt
//!   frame    0 8 offset in the plaintext  8 4 length; bit 31: last frame of a whole file
//!            12 8 counter  20 .. ciphertext, then 16 tag
//!   nonce    salt, counter
//!   authenticated data: the header, the first 20 bytes of the frame, the name of the file
//! ```
//!
//! Invariants:
//! - No frame crosses a block boundary, and each block begins with a frame (the first with the
//!   header). So a reader finds an offset of the plaintext without reading everything before it.
//! - No nonce is used twice. A salt belongs to one file and one writer, and its counter never goes
//!   back, even if frames are cut off and written again.
//! - A block is filled with zeros if its rest is too short for a frame.

use super::DataKey;
use crate::random_bytes;
use crate::{Error, Result};
use chacha20poly1305::aead::AeadInOut;
use chacha20poly1305::{KeyInit, Tag, XChaCha20Poly1305, XNonce};
use std::ops::Range;

pub const BLOCK_BYTES: u64 = 64 << 10;
pub const HEADER_BYTES: usize = 32;
const FRAME_BYTES: usize = 20;
const TAG_BYTES: usize = 16;
/// The largest number of bytes of plaintext in one block.
pub const PLAIN_BYTES_MAX: u64 = BLOCK_BYTES - (FRAME_BYTES + TAG_BYTES) as u64;
const MAGIC: &[u8; 8] = b"KF:ENC\r\n";
const LAST: u32 = 1 << 31;

/// The way in which an encrypted file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// At once, with a marked end.
    Whole = 1,
    /// By appends.
    Growing = 2,
}

/// The cipher of a store's files.
pub struct FileCipher(XChaCha20Poly1305);

impl std::fmt::Debug for FileCipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FileCipher(secret)")
    }
}

impl FileCipher {
    /// Makes the cipher from the key of a store's files.
    pub fn new(key: &DataKey) -> Self {
        Self(XChaCha20Poly1305::new((&*key.0).into()))
    }
}

/// The first 32 bytes of an encrypted file.
#[derive(Clone, Copy, Debug)]
pub struct FileHeader {
    pub kind: FileKind,
    salt: [u8; 16],
}

impl FileHeader {
    /// Creates the header of a new file of kind `kind`, with a random salt. Error: the system gives
    /// no random numbers.
    pub fn fresh(kind: FileKind) -> Result<Self> {
        Ok(Self { kind, salt: random_bytes()? })
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let fields = [&MAGIC[..], &(self.kind as u32).to_le_bytes(), &[0; 4], &self.salt];
        for (to, from) in out.iter_mut().zip(fields.concat()) {
            *to = from;
        }
        out
    }

    /// Decodes a header. `object` names the file in errors. Error: the bytes are not a header.
    pub fn decode(bytes: &[u8; HEADER_BYTES], object: &str) -> Result<Self> {
        let mut cursor = keyframe_bytes::ByteReader::new(bytes);
        let damaged = |problem: keyframe_bytes::ReadError| Error::damaged(object, problem);
        if cursor.array::<8>().map_err(damaged)? != *MAGIC {
            return Err(Error::damaged(
                object,
                "the file is not encrypted, as all files of this store are",
            ));
        }
        // There is one version of this format: `store.json` says that the files are encrypted so.
        let kind = match (cursor.u32_le().map_err(damaged)?, cursor.u32_le().map_err(damaged)?) {
            (1, 0) => FileKind::Whole,
            (2, 0) => FileKind::Growing,
            (other, _) => {
                return Err(Error::damaged(object, format!("unknown kind {other} in its header")));
            }
        };
        Ok(Self { kind, salt: cursor.array().map_err(damaged)? })
    }

    fn nonce(&self, counter: u64) -> XNonce {
        let mut nonce = XNonce::default();
        for (to, from) in nonce.iter_mut().zip(self.salt.into_iter().chain(counter.to_le_bytes())) {
            *to = from;
        }
        nonce
    }

    fn authenticated(&self, frame: &[u8], name: &str) -> Vec<u8> {
        [&self.encode(), frame, name.as_bytes()].concat()
    }
}

/// Encrypts the bytes that are appended to a file.
#[derive(Debug)]
pub struct FrameWriter {
    pub header: FileHeader,
    name: String,
    counter: u64,
    /// The number of bytes of plaintext so far.
    pub plain: u64,
    /// The number of bytes of the encrypted file so far.
    pub sealed: u64,
}

impl FrameWriter {
    /// Creates the writer of the new file `name`. The caller writes the header. Errors: those of
    /// [`FileHeader::fresh`].
    pub fn new(kind: FileKind, name: &str) -> Result<Self> {
        let header = FileHeader::fresh(kind)?;
        Ok(Self { header, name: name.into(), counter: 0, plain: 0, sealed: HEADER_BYTES as u64 })
    }

    /// Returns the encrypted frames of `bytes`, to be appended to the file after the frames of
    /// earlier calls. Error: the encryption fails.
    pub fn seal(&mut self, cipher: &FileCipher, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(bytes.len() + bytes.len() / 512 + 128);
        let mut rest = bytes;
        // A whole file ends with a frame, which may be empty.
        while !rest.is_empty() || self.header.kind == FileKind::Whole {
            let room = self.room(&mut out);
            let (piece, behind) = rest.split_at(rest.len().min(room));
            let is_last = self.header.kind == FileKind::Whole && behind.is_empty();
            self.frame(cipher, piece, is_last, &mut out)?;
            rest = behind;
            if is_last {
                break;
            }
        }
        Ok(out)
    }

    /// The most bytes of plaintext that the next frame can hold. Pads to the next block if there is
    /// no room in this one.
    fn room(&mut self, out: &mut Vec<u8>) -> usize {
        let left = (BLOCK_BYTES - self.sealed % BLOCK_BYTES) as usize;
        if left > FRAME_BYTES + TAG_BYTES {
            return left - FRAME_BYTES - TAG_BYTES;
        }
        out.resize(out.len() + left, 0);
        self.sealed += left as u64;
        PLAIN_BYTES_MAX as usize
    }

    fn frame(
        &mut self,
        cipher: &FileCipher,
        piece: &[u8],
        is_last: bool,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let flags = if is_last { LAST } else { 0 };
        let start = out.len();
        out.extend_from_slice(&self.plain.to_le_bytes());
        out.extend_from_slice(&(piece.len() as u32 | flags).to_le_bytes());
        out.extend_from_slice(&self.counter.to_le_bytes());
        let authenticated =
            self.header.authenticated(out.get(start..).unwrap_or_default(), &self.name);
        let at = out.len();
        out.extend_from_slice(piece);
        let nonce = self.header.nonce(self.counter);
        let inside = out.get_mut(at..).unwrap_or_default();
        let tag = cipher.0.encrypt_inout_detached(&nonce, &authenticated, inside.into());
        let tag = tag.map_err(|_| Error::damaged(&self.name, "cannot be encrypted"))?;
        out.extend_from_slice(&tag);
        self.counter += 1;
        self.plain += piece.len() as u64;
        self.sealed += (out.len() - start) as u64;
        Ok(())
    }
}

/// An encrypted frame in a block of a file.
#[derive(Clone, Debug)]
pub struct EncryptedFrame {
    /// Its range in the plaintext.
    pub plain: Range<u64>,
    pub is_last: bool,
    counter: u64,
    /// Its range in the block.
    inside: Range<usize>,
}

/// Returns the frames of a block, up to the first with an impossible length. The frames are not
/// authenticated yet. `number` is the number of the block in its file.
pub fn frames(block: &[u8], number: u64) -> Vec<EncryptedFrame> {
    let mut found = Vec::new();
    let mut at = if number == 0 { HEADER_BYTES } else { 0 };
    while let Some(frame) = frame_at(block, at) {
        at = frame.inside.end;
        found.push(frame);
    }
    found
}

fn frame_at(block: &[u8], at: usize) -> Option<EncryptedFrame> {
    let mut cursor = keyframe_bytes::ByteReader::new(block.get(at..at + FRAME_BYTES)?);
    let (plain, len, counter) =
        (cursor.u64_le().ok()?, cursor.u32_le().ok()?, cursor.u64_le().ok()?);
    let (len, is_last) = (len & !LAST, len & LAST != 0);
    let inside = at..at.checked_add(FRAME_BYTES + TAG_BYTES + len as usize)?;
    let fits = inside.end <= block.len() && (len > 0 || is_last);
    fits.then(|| {
        Some(EncryptedFrame {
            plain: plain..plain.checked_add(u64::from(len))?,
            is_last,
            counter,
            inside,
        })
    })?
}

/// Decrypts a frame and returns its plaintext. Returns `None` if it is not authentic for this file
/// name and header.
pub fn open(
    cipher: &FileCipher,
    header: &FileHeader,
    name: &str,
    block: &[u8],
    frame: &EncryptedFrame,
) -> Option<Vec<u8>> {
    let bytes = block.get(frame.inside.clone())?;
    let (head, rest) = bytes.split_at_checked(FRAME_BYTES)?;
    let (inside, tag) = rest.split_at_checked(rest.len().checked_sub(TAG_BYTES)?)?;
    let mut plain = inside.to_vec();
    let tag = Tag::try_from(tag).ok()?;
    let authenticated = header.authenticated(head, name);
    let opened = cipher.0.decrypt_inout_detached(
        &header.nonce(frame.counter),
        &authenticated,
        plain.as_mut_slice().into(),
        &tag,
    );
    opened.ok().map(|()| plain)
}

#[cfg(test)]
impl EncryptedFrame {
    /// Returns the frame's number in its file.
    pub fn counter(&self) -> u64 {
        self.counter
    }
}
