//! Encrypted frames, and the blocks of a file that they lie in.
//!
//! ```text
//!   file    | header 32 | frame | frame | ... | frame |00| frame | frame | ...
//!           |<--------------- block, 65536 ------------->|<------ block ------
//!
//!   header   0 8 magic "KFSEAL\r\n"   8 4 kind: 1 whole, 2 growing   12 4 zero   16 16 salt, random
//!   frame    0 8 offset in the plain file   8 4 length; bit 31: the last of a whole file   12 8 counter
//!            20 .. the bytes, encrypted      then 16 the tag
//!   nonce    salt, counter              authenticated too: the header, the 20 bytes before, the file's name
//! ```
//!
//! Invariants: no frame crosses a block, and a block begins with a frame (the first one with the
//! header), so that a place in the plain file is found without reading all before it. A salt is of
//! one file and one writing, and its counter never goes back, also where frames are cut off and
//! written anew: no nonce is used twice. What is too short at the end of a block is zeros.

use crate::config::random;
use crate::secret::DataKey;
use crate::{Error, Result};
use chacha20poly1305::aead::AeadInOut;
use chacha20poly1305::{KeyInit, Tag, XChaCha20Poly1305, XNonce};
use std::ops::Range;

pub const BLOCK_BYTES: u64 = 64 << 10;
pub const HEADER_BYTES: usize = 32;
const FRAME_BYTES: usize = 20;
const TAG_BYTES: usize = 16;
/// The most of the plain file that is in a block.
pub const PLAIN_BYTES_MAX: u64 = BLOCK_BYTES - (FRAME_BYTES + TAG_BYTES) as u64;
const MAGIC: &[u8; 8] = b"KFSEAL\r\n";
const LAST: u32 = 1 << 31;

/// How a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// At once, with an end.
    Whole = 1,
    /// Bit by bit.
    Growing = 2,
}

/// What encrypts the files of a store.
pub struct Sealer(XChaCha20Poly1305);

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sealer(secret)")
    }
}

impl Sealer {
    pub fn new(key: &DataKey) -> Self {
        Self(XChaCha20Poly1305::new((&*key.0).into()))
    }
}

/// What a file begins with.
#[derive(Clone, Copy, Debug)]
pub struct Header {
    pub kind: Kind,
    salt: [u8; 16],
}

impl Header {
    pub fn fresh(kind: Kind) -> Result<Self> {
        Ok(Self { kind, salt: random()? })
    }

    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let fields = [&MAGIC[..], &(self.kind as u32).to_le_bytes(), &[0; 4], &self.salt];
        for (to, from) in out.iter_mut().zip(fields.concat()) {
            *to = from;
        }
        out
    }

    pub fn decode(bytes: &[u8; HEADER_BYTES], object: &str) -> Result<Self> {
        let mut cursor = crate::bytes::Cursor::new(bytes);
        let damaged = |problem: keyframe_bytes::ReadError| Error::damaged(object, problem);
        if cursor.array::<8>().map_err(damaged)? != *MAGIC {
            return Err(Error::damaged(object, "is not encrypted, as all files of this store are"));
        }
        // Version 5 of `store.json` says that files are so.
        let kind = match (cursor.u32_le().map_err(damaged)?, cursor.u32_le().map_err(damaged)?) {
            (1, 0) => Kind::Whole,
            (2, 0) => Kind::Growing,
            (other, _) => {
                return Err(Error::damaged(object, format!("is of kind {other}, which is none")));
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

/// Encrypts what comes behind what is there.
#[derive(Debug)]
pub struct Seals {
    pub header: Header,
    name: String,
    counter: u64,
    /// The end of the plain file.
    pub plain: u64,
    /// The end of the encrypted one.
    pub sealed: u64,
}

impl Seals {
    /// For an empty file; the header is for the caller to write.
    pub fn new(kind: Kind, name: &str) -> Result<Self> {
        let header = Header::fresh(kind)?;
        Ok(Self { header, name: name.into(), counter: 0, plain: 0, sealed: HEADER_BYTES as u64 })
    }

    /// The frames of `bytes`, to be written at `self.sealed` as it was before.
    pub fn seal(&mut self, sealer: &Sealer, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(bytes.len() + bytes.len() / 512 + 128);
        let mut rest = bytes;
        // A whole file ends with a frame, be it empty.
        while !rest.is_empty() || self.header.kind == Kind::Whole {
            let room = self.room(&mut out);
            let (piece, behind) = rest.split_at(rest.len().min(room));
            let is_last = self.header.kind == Kind::Whole && behind.is_empty();
            self.frame(sealer, piece, is_last, &mut out)?;
            rest = behind;
            if is_last {
                break;
            }
        }
        Ok(out)
    }

    /// How much of the plain file the next frame can hold; goes to the next block where that is
    /// nothing.
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
        sealer: &Sealer,
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
        let tag = sealer.0.encrypt_inout_detached(&nonce, &authenticated, inside.into());
        let tag = tag.map_err(|_| Error::damaged(&self.name, "cannot be encrypted"))?;
        out.extend_from_slice(&tag);
        self.counter += 1;
        self.plain += piece.len() as u64;
        self.sealed += (out.len() - start) as u64;
        Ok(())
    }
}

/// A frame as it lies in a block.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Which part of the plain file it is.
    pub plain: Range<u64>,
    pub is_last: bool,
    counter: u64,
    /// Where it is in the block.
    inside: Range<usize>,
}

/// The frames of a block, as far as their lengths make sense. Nothing of them is authenticated yet.
pub fn frames(block: &[u8], number: u64) -> Vec<Frame> {
    let mut found = Vec::new();
    let mut at = if number == 0 { HEADER_BYTES } else { 0 };
    while let Some(frame) = frame_at(block, at) {
        at = frame.inside.end;
        found.push(frame);
    }
    found
}

fn frame_at(block: &[u8], at: usize) -> Option<Frame> {
    let mut cursor = crate::bytes::Cursor::new(block.get(at..at + FRAME_BYTES)?);
    let (plain, len, counter) =
        (cursor.u64_le().ok()?, cursor.u32_le().ok()?, cursor.u64_le().ok()?);
    let (len, is_last) = (len & !LAST, len & LAST != 0);
    let inside = at..at.checked_add(FRAME_BYTES + TAG_BYTES + len as usize)?;
    let fits = inside.end <= block.len() && (len > 0 || is_last);
    fits.then(|| {
        Some(Frame { plain: plain..plain.checked_add(u64::from(len))?, is_last, counter, inside })
    })?
}

/// The bytes of a frame, if it is what was written under this name at this place.
pub fn open(
    sealer: &Sealer,
    header: &Header,
    name: &str,
    block: &[u8],
    frame: &Frame,
) -> Option<Vec<u8>> {
    let bytes = block.get(frame.inside.clone())?;
    let (head, rest) = bytes.split_at_checked(FRAME_BYTES)?;
    let (inside, tag) = rest.split_at_checked(rest.len().checked_sub(TAG_BYTES)?)?;
    let mut plain = inside.to_vec();
    let tag = Tag::try_from(tag).ok()?;
    let authenticated = header.authenticated(head, name);
    let opened = sealer.0.decrypt_inout_detached(
        &header.nonce(frame.counter),
        &authenticated,
        plain.as_mut_slice().into(),
        &tag,
    );
    opened.ok().map(|()| plain)
}

#[cfg(test)]
impl Frame {
    pub fn counter(&self) -> u64 {
        self.counter
    }
}
