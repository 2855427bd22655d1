//! Reads a whole migration stream that QEMU wrote (`migrate exec:cat>FILE`): RAM pages, and the
//! state of the devices.
//!
//! ```text
//!   QEVM 3 │ 07 machine type │ 01 "ram": blocks │ 02 pages ... │ 03 pages
//!            └ optional                           └ repeated
//!          │ 04 device │ 04 device ... │ 00 │ 06 description
//!            └─ kept, byte for byte ─┘        └ dropped
//! ```
//!
//! A page may come more than once; the last one counts. Device sections carry no length, so their
//! end is found from the end of the stream: the description after the end mark has a length and
//! reaches to the end.
//!
//! Invariant: the stream is untrusted. Each length is bounded before memory is allocated for it,
//! each page lies in a listed block, and each loop ends.
//!
//! Not handled: whether the blocks are those of the machine (the caller compares them with a fresh
//! QEMU's), and streams of other forms, which are refused by the name of the feature.

use crate::format::{
    FLAG_CONTINUE, FLAG_EOS, FLAG_MEM_SIZE, FLAG_PAGE, FLAG_ZERO, HEADER_BYTES, MAGIC, PAGE_BITS,
    RAM_VERSION, SECTION_CONFIGURATION, SECTION_DESCRIPTION, SECTION_END, SECTION_EOF,
    SECTION_FOOTER, SECTION_FULL, SECTION_START, SUBSECTION, VERSION,
};
use crate::{Result, StreamError};
use keyframe_units::{PAGE_BYTES, Page, ZERO_PAGE};
use std::io::{self, Read};

const SECTION_PART: u8 = 0x02;
const SECTION_COMMAND: u8 = 0x08;
/// Flags of pages of refused features, with QEMU's name of the feature.
const FLAGS_REFUSED: [(u64, &str); 4] =
    [(0x40, "xbzrle"), (0x80, "rdma-pin-all"), (0x100, "compress"), (0x200, "multifd")];
/// Upper bound of the number of RAM blocks.
const BLOCKS_MAX: usize = 4096;
/// Upper bound of all RAM: 16 TiB, the store's limit.
const RAM_BYTES_MAX: u64 = 1 << 44;
/// Upper bound of devices and their description in bytes.
const TAIL_BYTES_MAX: u64 = 256 << 20;
/// QEMU sends it before the last pages; the stream's form stays the same.
const COMMAND_SWITCHOVER_START: u16 = 11;
const MACHINE_TYPE_BYTES_MAX: u32 = 255;
/// How often a stream may send each page on average.
const ROUNDS_MAX: u64 = 1024;

/// A RAM block in the list of a migration stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigrationBlock {
    /// QEMU's name of the block.
    pub name: String,
    /// Bytes in use.
    pub used_bytes: u64,
}

/// The caller's function that takes a page: the number of its block in the list, its offset in the
/// block in bytes, and its content. Its error ends the reading.
pub type MigrationPageSink<'a> = &'a mut dyn FnMut(usize, u64, &Page) -> io::Result<()>;

/// Reads a migration stream whose header and list of RAM blocks have been read.
#[derive(Debug)]
pub struct MigrationReader<R> {
    input: Input<R>,
    machine_type: Option<String>,
    section: u32,
    blocks: Vec<MigrationBlock>,
}

impl<R: Read> MigrationReader<R> {
    /// Reads `input` up to the end of the list of RAM blocks.
    ///
    /// Errors: [`StreamError::Migration`] if this is no migration stream,
    /// [`StreamError::MigrationFeature`] for one of another form.
    pub fn begin(input: R) -> Result<Self> {
        let mut input = Input { inner: input, at: 0 };
        if input.array::<4>()? != MAGIC {
            return Err(StreamError::Migration {
                offset: 0,
                problem: "it does not begin with QEVM".into(),
            });
        }
        let version = input.u32()?;
        if version != VERSION {
            return Err(
                input.problem(format!("version {version}; only version {VERSION} is known"))
            );
        }
        let mut kind = input.u8()?;
        let mut machine_type = None;
        if kind == SECTION_CONFIGURATION {
            let (name, next) = configuration(&mut input)?;
            (machine_type, kind) = (Some(name), next);
        }
        if kind != SECTION_START {
            return Err(unexpected(&mut input, kind));
        }
        let section = input.u32()?;
        let name = input.name()?;
        if name != "ram" {
            let problem =
                format!("it begins with section {name}; Keyframe reads RAM and devices only");
            return Err(input.problem(problem));
        }
        let (_instance, version) = (input.u32()?, input.u32()?);
        if version != RAM_VERSION {
            return Err(input.problem(format!(
                "section ram of version {version}; only version {RAM_VERSION} is known"
            )));
        }
        let blocks = blocks(&mut input)?;
        input.footer(section)?;
        Ok(Self { input, machine_type, section, blocks })
    }

    /// Returns the machine type; `None` if the stream does not name it.
    pub fn machine_type(&self) -> Option<&str> {
        self.machine_type.as_deref()
    }

    /// Returns the RAM blocks.
    pub fn blocks(&self) -> &[MigrationBlock] {
        &self.blocks
    }

    /// Gives each page to `sink` in the stream's order. Returns the device state in the form that
    /// `xen-save-devices-state` writes. Errors: the stream is malformed or ends early; those of
    /// `sink`.
    pub fn finish(mut self, sink: MigrationPageSink<'_>) -> Result<Vec<u8>> {
        let pages: u64 = self.blocks.iter().map(|b| b.used_bytes / PAGE_BYTES as u64).sum();
        let mut words_left = pages.saturating_mul(ROUNDS_MAX).saturating_add(1 << 20);
        // A part may continue in the block in which the previous part ended.
        let mut block = None;
        loop {
            let kind = self.input.u8()?;
            if kind == SECTION_COMMAND {
                command(&mut self.input)?;
                words_left = words_left
                    .checked_sub(1)
                    .ok_or_else(|| self.input.problem("it sends too many commands".into()))?;
                continue;
            }
            if !matches!(kind, SECTION_PART | SECTION_END) {
                return Err(unexpected(&mut self.input, kind));
            }
            let section = self.input.u32()?;
            if section != self.section {
                return Err(self
                    .input
                    .problem(format!("a part of section {section}, which did not begin")));
            }
            self.pages(sink, &mut words_left, &mut block)?;
            self.input.footer(section)?;
            if kind == SECTION_END {
                return self.devices();
            }
        }
    }

    /// Reads the pages of one part. `block` is the number of the block that the next page belongs
    /// to if it names none.
    fn pages(
        &mut self,
        sink: MigrationPageSink<'_>,
        words_left: &mut u64,
        block: &mut Option<usize>,
    ) -> Result<()> {
        loop {
            let word = self.input.u64()?;
            let (offset, flags) = (word & !(PAGE_BYTES as u64 - 1), word & (PAGE_BYTES as u64 - 1));
            if let Some((_, feature)) = FLAGS_REFUSED.iter().find(|(flag, _)| flags & flag != 0) {
                return Err(StreamError::MigrationFeature { feature: (*feature).into() });
            }
            if flags == FLAG_EOS {
                return Ok(());
            }
            *words_left = words_left
                .checked_sub(1)
                .ok_or_else(|| self.input.problem("it sends pages too often".into()))?;
            if flags & FLAG_CONTINUE == 0 {
                let name = self.input.name()?;
                *block = self.blocks.iter().position(|b| b.name == name);
                if block.is_none() {
                    return Err(self
                        .input
                        .problem(format!("a page of RAM block {name}, which is not listed")));
                }
            }
            let Some((number, listed)) = block.and_then(|n| Some((n, self.blocks.get(n)?))) else {
                return Err(self.input.problem("a page without a block".into()));
            };
            if offset >= listed.used_bytes {
                let problem =
                    format!("a page at {offset:#x} of RAM block {}, after its end", listed.name);
                return Err(self.input.problem(problem));
            }
            let page = match flags & !FLAG_CONTINUE {
                FLAG_PAGE => self.input.array::<PAGE_BYTES>()?,
                FLAG_ZERO => match self.input.u8()? {
                    0 => ZERO_PAGE,
                    byte => {
                        return Err(self.input.problem(format!("a page filled with {byte:#04x}")));
                    }
                },
                other => return Err(self.input.problem(format!("a page with flags {other:#x}"))),
            };
            sink(number, offset, &page)
                .map_err(StreamError::io(format!("keep a page of RAM block {}", listed.name)))?;
        }
    }

    /// Reads the rest: the device sections up to the end mark, with a header before them.
    fn devices(mut self) -> Result<Vec<u8>> {
        let mut state = [&MAGIC[..], &VERSION.to_be_bytes()].concat();
        let from = self.input.at;
        let read = (&mut self.input.inner).take(TAIL_BYTES_MAX + 1).read_to_end(&mut state);
        let read =
            read.map_err(StreamError::io("read the devices of the migration stream"))? as u64;
        if read > TAIL_BYTES_MAX {
            let problem = format!("more than {TAIL_BYTES_MAX} bytes of devices");
            return Err(StreamError::Migration { offset: from, problem });
        }
        match state.get(HEADER_BYTES) {
            Some(&SECTION_FULL) => {}
            Some(&SECTION_COMMAND) => {
                return Err(StreamError::MigrationFeature { feature: "postcopy-ram".into() });
            }
            Some(kind) => {
                let problem =
                    format!("section type {kind:#04x} after RAM, where devices were expected");
                return Err(StreamError::Migration { offset: from, problem });
            }
            None => {
                return Err(StreamError::Migration {
                    offset: from,
                    problem: "it ends after RAM".into(),
                });
            }
        }
        let Some(end) = end_mark(&state) else {
            let problem = "it lacks its end mark: it is cut short, or was not finished".into();
            return Err(StreamError::Migration { offset: from + read, problem });
        };
        state.truncate(end + 1);
        crate::check(&state)?;
        Ok(state)
    }
}

/// Offset of the end mark: the last byte, or the byte before a description that reaches to the end.
fn end_mark(state: &[u8]) -> Option<usize> {
    let is_end = |at: usize| {
        let footer = at.checked_sub(5).and_then(|f| state.get(f)) == Some(&SECTION_FOOTER);
        footer && at > HEADER_BYTES && state.get(at) == Some(&SECTION_EOF)
    };
    let described = |at: &usize| {
        let rest = state.get(at + 1..).unwrap_or_default();
        let Some((&[SECTION_DESCRIPTION, a, b, c, d], text)) = rest.split_first_chunk::<5>() else {
            return false;
        };
        is_end(*at)
            && u32::from_be_bytes([a, b, c, d]) as usize == text.len()
            && text.first() == Some(&b'{')
    };
    // The description is JSON without a zero byte, so the last offset that fits is the right one.
    let last = state.len().checked_sub(1)?;
    if is_end(last) { Some(last) } else { (0..last).rev().find(described) }
}

/// Reads the machine type; returns it with the type of the next section.
fn configuration<R: Read>(input: &mut Input<R>) -> Result<(String, u8)> {
    let len = input.u32()?;
    if len == 0 || len > MACHINE_TYPE_BYTES_MAX {
        return Err(input.problem(format!("a machine type of {len} bytes")));
    }
    let name = input.text(len as usize)?;
    loop {
        let kind = input.u8()?;
        if kind != SUBSECTION {
            return Ok((name, kind));
        }
        let (part, _version) = (input.name()?, input.u32()?);
        match part.as_str() {
            PAGE_BITS => {
                let bits = input.u32()?;
                if 1u64.checked_shl(bits) != Some(PAGE_BYTES as u64) {
                    return Err(input.problem(format!("pages of 2^{bits} bytes")));
                }
            }
            "configuration/uuid" => drop(input.array::<16>()?),
            "configuration/capabilities" => {
                // It lists those that change the stream's form.
                let count = input.u32()?;
                let feature = if count == 0 { continue } else { input.name()? };
                return Err(StreamError::MigrationFeature { feature });
            }
            _ => return Err(input.problem(format!("an unknown part {part} in its configuration"))),
        }
    }
}

/// Reads the list of RAM blocks to its end.
fn blocks<R: Read>(input: &mut Input<R>) -> Result<Vec<MigrationBlock>> {
    let word = input.u64()?;
    let page = PAGE_BYTES as u64;
    let (mut left, flags) = (word & !(page - 1), word & (page - 1));
    if flags != FLAG_MEM_SIZE || left > RAM_BYTES_MAX {
        return Err(input.problem(format!("a list of RAM blocks that begins with {word:#x}")));
    }
    let mut blocks: Vec<MigrationBlock> = Vec::new();
    while left > 0 {
        let (name, used_bytes) = (input.name()?, input.u64()?);
        let sane = used_bytes > 0 && used_bytes.is_multiple_of(page) && used_bytes <= left;
        if !sane || blocks.len() == BLOCKS_MAX || blocks.iter().any(|b| b.name == name) {
            return Err(
                input.problem(format!("RAM block {name} of {used_bytes} bytes in its list"))
            );
        }
        left -= used_bytes;
        blocks.push(MigrationBlock { name, used_bytes });
    }
    match input.u64()? {
        FLAG_EOS => Ok(blocks),
        word if word & 0x200 != 0 => {
            Err(StreamError::MigrationFeature { feature: "multifd".into() })
        }
        // The list holds page sizes only if postcopy is enabled.
        _ => Err(StreamError::MigrationFeature { feature: "postcopy-ram".into() }),
    }
}

/// Skips the one command that changes nothing. Refuses the others, which belong to postcopy and
/// return paths.
fn command<R: Read>(input: &mut Input<R>) -> Result<()> {
    let (command, len) = (u16::from_be_bytes(input.array()?), u16::from_be_bytes(input.array()?));
    if (command, len) == (COMMAND_SWITCHOVER_START, 0) {
        return Ok(());
    }
    let feature = if matches!(command, 1 | 2) { "return-path" } else { "postcopy-ram" };
    Err(StreamError::MigrationFeature { feature: feature.into() })
}

/// The error for a section of type `kind` that must not come here.
fn unexpected<R: Read>(input: &mut Input<R>, kind: u8) -> StreamError {
    let named = |input: &mut Input<R>| {
        input.u32()?;
        input.name()
    };
    match kind {
        SECTION_COMMAND => match command(input) {
            Ok(()) => input.problem("a command before RAM".into()),
            Err(error) => error,
        },
        SECTION_START | SECTION_FULL => match named(input) {
            Ok(name) => input.problem(format!(
                "section {name} before the end of RAM, which Keyframe does not read"
            )),
            Err(error) => error,
        },
        SECTION_EOF => input.problem("it ends before the end of RAM".into()),
        kind => input.problem(format!("a section of unknown type {kind:#04x}")),
    }
}

/// An input that counts the bytes read.
#[derive(Debug)]
struct Input<R> {
    inner: R,
    at: u64,
}

impl<R: Read> Input<R> {
    fn problem(&self, problem: String) -> StreamError {
        StreamError::Migration { offset: self.at, problem }
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.inner.read_exact(bytes).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.problem("it is cut short here".into()),
            _ => StreamError::io("read the migration stream")(e),
        })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_be_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// Reads a name: a length of one byte, then the text.
    fn name(&mut self) -> Result<String> {
        let len = usize::from(self.u8()?);
        self.text(len)
    }

    fn text(&mut self, len: usize) -> Result<String> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes)?;
        match String::from_utf8(bytes) {
            Ok(text) if !text.is_empty() && !text.chars().any(char::is_control) => Ok(text),
            _ => Err(self.problem("a name that is empty or not printable".into())),
        }
    }

    fn footer(&mut self, section: u32) -> Result<()> {
        let (mark, id) = (self.u8()?, self.u32()?);
        if (mark, id) == (SECTION_FOOTER, section) {
            return Ok(());
        }
        Err(self.problem(format!("section {section} does not end where its contents do")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MigrationHead, StreamBlock, write_migration};
    use keyframe_machine::Processor;
    use proptest::prelude::*;

    fn devices() -> Vec<u8> {
        let mut state = b"QEVM\0\0\0\x03\x04\0\0\0\x02\x05timer\0\0\0\0\0\0\0\x02".to_vec();
        state.extend([7; 24]);
        state.extend(b"\x7e\0\0\0\x02\0");
        state
    }

    /// A stream of two blocks, written by this crate.
    fn stream(fill: &[(u64, u8)]) -> Vec<u8> {
        let pages: Vec<(u64, u8)> = fill.to_vec();
        let mut first = move |sink: crate::PageSink<'_>| -> io::Result<()> {
            pages
                .iter()
                .try_for_each(|(page, byte)| sink(page * PAGE_BYTES as u64, &[*byte; PAGE_BYTES]))
        };
        let mut second = |_: crate::PageSink<'_>| Ok(());
        let mut blocks = [
            StreamBlock { name: "pc.ram", used_bytes: 16 * PAGE_BYTES as u64, pages: &mut first },
            StreamBlock { name: "pc.bios", used_bytes: 2 * PAGE_BYTES as u64, pages: &mut second },
        ];
        let mut out = Vec::new();
        let head = MigrationHead { machine_type: "pc-i440fx-7.2", processor: Processor::X86_64 };
        write_migration(&head, &devices(), &mut blocks, &mut out).unwrap();
        out
    }

    fn read(bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
        let incoming = MigrationReader::begin(bytes)?;
        let mut ram = vec![0; 18 * PAGE_BYTES];
        let state = incoming.finish(&mut |block, offset, page| {
            let at = block * 16 * PAGE_BYTES + offset as usize;
            let place =
                ram.get_mut(at..at + PAGE_BYTES).ok_or_else(|| io::Error::other("outside"))?;
            place.copy_from_slice(page);
            Ok(())
        })?;
        Ok((ram, state))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn written_streams_are_read_back(pages in prop::collection::btree_map(0u64..16, any::<u8>(), 0..16)) {
            let pages: Vec<(u64, u8)> = pages.into_iter().collect();
            let (ram, state) = read(&stream(&pages)).unwrap();
            let mut oracle = vec![0; 18 * PAGE_BYTES];
            for (page, byte) in pages {
                oracle[page as usize * PAGE_BYTES..][..PAGE_BYTES].fill(byte);
            }
            prop_assert!(ram == oracle);
            prop_assert_eq!(state, devices());
        }

        /// A truncated stream is an error; a stream with changed bytes does not panic.
        #[test]
        fn no_stream_panics(cut in 0usize..8000, edits in prop::collection::vec((0usize..9000, any::<u8>()), 0..6)) {
            let mut bytes = stream(&[(0, 1), (3, 2)]);
            let cut_short = bytes.get(..cut.min(bytes.len() - 1)).unwrap();
            prop_assert!(read(cut_short).is_err());
            for (at, byte) in edits {
                let len = bytes.len();
                bytes[at % len] = byte;
            }
            let _ = read(&bytes);
        }

        #[test]
        fn no_bytes_panic(tail in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&[b"QEVM\0\0\0\x03", &tail[..]].concat());
            let _ = read(&[b"QEVM\0\0\0\x03\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04", &tail[..]].concat());
        }
    }

    #[test]
    fn refused_features_are_named() {
        let good = stream(&[(0, 1)]);
        let word = |flags: u64| (4096 | flags).to_be_bytes();
        let second = good.windows(8).position(|w| w == word(FLAG_ZERO | FLAG_CONTINUE)).unwrap();
        for (flag, feature) in FLAGS_REFUSED {
            let mut bytes = good.clone();
            bytes[second..second + 8].copy_from_slice(&word(flag));
            let error = read(&bytes).unwrap_err();
            assert!(error.to_string().contains(feature) && error.fix().is_some(), "{error}");
        }
        let mut mapped =
            b"QEVM\0\0\0\x03\x07\0\0\0\x02pc\x05\x1aconfiguration/capabilities\0\0\0\x01".to_vec();
        mapped.extend(b"\0\0\0\x01\x0amapped-ram");
        assert!(read(&mapped).unwrap_err().to_string().contains("mapped-ram"));
        let command = b"QEVM\0\0\0\x03\x07\0\0\0\x02pc\x08\0\x03\0\0";
        assert!(read(command).unwrap_err().to_string().contains("postcopy"));
    }

    #[test]
    fn a_page_outside_its_block_is_refused() {
        let mut bytes = stream(&[]);
        let word = ((15 * PAGE_BYTES as u64) | FLAG_ZERO | FLAG_CONTINUE).to_be_bytes();
        let at = bytes.windows(8).position(|w| w == word).unwrap();
        bytes[at..at + 8]
            .copy_from_slice(&((16 * PAGE_BYTES as u64) | FLAG_ZERO | FLAG_CONTINUE).to_be_bytes());
        let error = read(&bytes).unwrap_err();
        assert!(error.to_string().contains("after its end"), "{error}");
    }
}
