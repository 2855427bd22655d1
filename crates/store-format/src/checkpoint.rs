//! The file of a checkpoint. Under its final name it seals the checkpoint.
//!
//! ```text
//!   magic "KF:CKP\r\n", version, then (see [`crate::envelope`])
//!    12  4 flags: 1 = device state is LZ4    16  8 id                 24 16 store id
//!    40  8 meta length                       48  8 device state length as stored
//!    56  8 device state length               64 .. meta (JSON), device state       end-32 32 BLAKE3
//! ```

use crate::codec::{compress_section, decompress_section};
use crate::envelope;
use crate::error::{FormatError, Result};
use crate::identity::StoreId;
use crate::meta::Meta;
use keyframe_bytes::ByteReader;
use keyframe_pages::bytes::Problem;

const MAGIC: envelope::Magic = *b"KF:CKP\r\n";
const FLAG_LZ4: u32 = 1;
/// The longest checkpoint file that is read, in bytes. Device state with all ROMs stays far below.
pub const CHECKPOINT_BYTES_MAX: u64 = 4 << 30;

/// The content of a checkpoint file.
#[derive(Debug)]
pub struct CheckpointFile {
    /// The description of the checkpoint.
    pub meta: Meta,
    /// The device state as QEMU gave it.
    pub device_state: Vec<u8>,
}

/// The device state in the form in which a checkpoint file holds it. It is made before the
/// description of the checkpoint, which states its size.
#[derive(Debug)]
pub struct DeviceSection<'a> {
    raw: &'a [u8],
    coded: Option<Vec<u8>>,
}

impl<'a> DeviceSection<'a> {
    /// Creates the section of the device state `raw`, compressed if that makes it smaller.
    pub fn new(raw: &'a [u8]) -> Self {
        Self { raw, coded: compress_section(raw) }
    }

    fn stored(&self) -> &[u8] {
        self.coded.as_deref().unwrap_or(self.raw)
    }

    /// Returns the length in the file, in bytes.
    pub fn stored_bytes(&self) -> u64 {
        self.stored().len() as u64
    }
}

/// Encodes the file of checkpoint `id`. Error: the description cannot be written as JSON.
pub fn encode(id: u64, store: StoreId, meta: &Meta, device: &DeviceSection<'_>) -> Result<Vec<u8>> {
    let meta = serde_json::to_vec(meta).map_err(|e| {
        FormatError::damaged(format!("checkpoint {id}"), format!("cannot be written as JSON: {e}"))
    })?;
    let mut out = envelope::begin(MAGIC);
    out.extend_from_slice(&(if device.coded.is_some() { FLAG_LZ4 } else { 0 }).to_le_bytes());
    out.extend_from_slice(&id.to_le_bytes());
    out.extend_from_slice(&store.0);
    for len in [meta.len(), device.stored().len(), device.raw.len()] {
        out.extend_from_slice(&(len as u64).to_le_bytes());
    }
    out.extend_from_slice(&meta);
    out.extend_from_slice(device.stored());
    Ok(envelope::finish(out))
}

/// Parses the file of checkpoint `id`. `object` names the file in errors.
///
/// Errors: [`FormatError::Damaged`](crate::FormatError::Damaged) if the bytes are not those of this
/// checkpoint of this store, [`FormatError::OtherVersion`](crate::FormatError::OtherVersion) for
/// another version of the format.
pub fn decode(bytes: &[u8], id: u64, store: StoreId, object: &str) -> Result<CheckpointFile> {
    let content = envelope::open(bytes, MAGIC, object)?;
    let parsed = decode_content(content, id, store)
        .and_then(|(meta, device)| Ok(CheckpointFile { meta, device_state: device.restore()? }));
    parsed.map_err(|problem| FormatError::damaged(object, problem))
}

/// Checks the whole file of checkpoint `id` and returns its description. Does not decompress the
/// device state, which is most of the file. `object` names the file in errors.
///
/// Errors: [`FormatError::Damaged`](crate::FormatError::Damaged) if the bytes are not those of this
/// checkpoint of this store, [`FormatError::OtherVersion`](crate::FormatError::OtherVersion) for
/// another version of the format.
pub fn decode_meta(bytes: &[u8], id: u64, store: StoreId, object: &str) -> Result<Meta> {
    let content = envelope::open(bytes, MAGIC, object)?;
    decode_content(content, id, store)
        .map(|(meta, _)| meta)
        .map_err(|problem| FormatError::damaged(object, problem))
}

/// The device state as the file holds it.
struct Stored<'a> {
    bytes: &'a [u8],
    is_coded: bool,
    len: u64,
}

impl Stored<'_> {
    fn restore(&self) -> Result<Vec<u8>, Problem> {
        if self.is_coded {
            decompress_section(self.bytes, self.len)
        } else {
            Ok(self.bytes.to_vec())
        }
    }
}

fn decode_content(content: &[u8], id: u64, store: StoreId) -> Result<(Meta, Stored<'_>), Problem> {
    let mut reader = ByteReader::new(content);
    let flags = reader.u32_le()?;
    let found = reader.u64_le()?;
    if found != id {
        return Err(format!("holds checkpoint {found} instead"));
    }
    if reader.array()? != store.0 {
        return Err("belongs to another store".into());
    }
    let (meta_len, stored_len, device_len) = (reader.u64_le()?, reader.u64_le()?, reader.u64_le()?);
    let meta = reader.take(usize::try_from(meta_len).map_err(|e| e.to_string())?)?;
    let stored = reader.take(usize::try_from(stored_len).map_err(|e| e.to_string())?)?;
    let is_coded = match flags {
        0 if device_len == stored_len => false,
        FLAG_LZ4 if device_len <= CHECKPOINT_BYTES_MAX => true,
        _ => return Err("flags or lengths contradict each other".into()),
    };
    if !reader.is_empty() {
        return Err("has bytes after its last section".into());
    }
    let meta: Meta = serde_json::from_slice(meta).map_err(|e| format!("its description: {e}"))?;
    // Each map is older than the one before it, so a chain has no circle.
    let falls =
        meta.map_chain.windows(2).all(|pair| matches!(pair, [newer, older] if newer > older));
    if meta.map_chain.first() != Some(&id) || meta.map_chain.last() == Some(&0) || !falls {
        return Err("its list of maps is impossible".into());
    }
    if meta.space_pages().is_none() {
        return Err("its disks are impossibly large".into());
    }
    Ok((meta, Stored { bytes: stored, is_coded, len: device_len }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::{Counts, MachineMeta, MemberMeta, Timing};
    use keyframe_units::{Epoch, RamLayout};
    use proptest::prelude::*;

    const STORE: StoreId = StoreId([4; 16]);

    fn meta(map_chain: Vec<u64>) -> Meta {
        Meta {
            origin: None,
            vm: "vm".into(),
            run: "00".repeat(16),
            epoch: Epoch(3),
            parent: None,
            taken_at: jiff::Timestamp::UNIX_EPOCH,
            since_boot: None,
            reason: "interval".into(),
            ram: RamLayout::new(Vec::new()).unwrap(),
            disks: Vec::new(),
            machine: MachineMeta::default(),
            members: Vec::new(),
            timing: Timing::default(),
            counts: Counts::default(),
            map_chain,
        }
    }

    fn file(chain: &[u64], device: &[u8]) -> Vec<u8> {
        encode(9, STORE, &meta(chain.to_vec()), &DeviceSection::new(device)).unwrap()
    }

    #[test]
    fn an_impossible_chain_is_refused() {
        assert!(decode(&file(&[9, 8, 1], b""), 9, STORE, "c").is_ok());
        for chain in [&[][..], &[8], &[9, 9], &[9, 1, 8], &[9, 0]] {
            assert!(decode(&file(chain, b""), 9, STORE, "c").is_err(), "{chain:?}");
        }
        assert!(decode(&file(&[9], b""), 8, STORE, "c").is_err(), "another number");
        assert!(decode(&file(&[9], b""), 9, StoreId([5; 16]), "c").is_err(), "another store");
    }

    #[test]
    fn the_fields_of_a_pause_have_their_documented_names() {
        let text = serde_json::to_value(meta(vec![9])).unwrap();
        let pause = text["timing"]["pause"].as_object().unwrap();
        let mut names: Vec<_> = pause.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["copy", "device_state", "resume", "scan", "stop"]);
    }

    #[test]
    fn the_ram_of_a_group_is_split_by_member_and_a_contradiction_is_refused() {
        use keyframe_units::{BlockKind, PageIndex, RamBlock};
        let block = |name: &str, pages: u64| RamBlock {
            name: name.into(),
            kind: BlockKind::Backend,
            used_bytes: 4096 * pages,
            total_bytes: 4096 * pages,
        };
        let mut meta = meta(vec![9]);
        meta.ram =
            RamLayout::new(vec![block("a/pc.ram", 5), block("a/pc.bios", 2), block("b/pc.ram", 3)])
                .unwrap();
        let member = |name: &str, ram_blocks| MemberMeta {
            name: name.into(),
            ram_blocks,
            ..MemberMeta::default()
        };
        meta.members = vec![member("a", 2), member("b", 1)];
        let found = meta.members_ram().unwrap();
        assert_eq!(
            found.iter().map(|(_, first)| *first).collect::<Vec<_>>(),
            [PageIndex(0), PageIndex(7)]
        );
        assert_eq!(found[1].0.blocks()[0].name, "pc.ram");
        for wrong in [
            vec![member("a", 2)],
            vec![member("a", 1), member("b", 2)],
            vec![member("a", 2), member("b", usize::MAX)],
        ] {
            meta.members = wrong;
            assert!(meta.members_ram().is_none());
        }
    }

    proptest! {
        #[test]
        fn device_states_come_back(noise in prop::collection::vec(any::<u8>(), 0..200), zeros in 0usize..5000) {
            let mut device = noise;
            device.resize(device.len() + zeros, 0);
            let back = decode(&file(&[9], &device), 9, STORE, "c").unwrap();
            prop_assert_eq!(back.device_state, device);
            prop_assert_eq!(back.meta, meta(vec![9]));
        }

        /// The parser of the content, after a checksum that matches.
        #[test]
        fn arbitrary_content_never_panics(
            tail in prop::collection::vec(any::<u8>(), 0..300), flags in 0u32..3,
            lens in prop::array::uniform3(prop_oneof![any::<u64>(), 0u64..300]),
        ) {
            let mut content = flags.to_le_bytes().to_vec();
            content.extend_from_slice(&9u64.to_le_bytes());
            content.extend_from_slice(&STORE.0);
            for len in lens {
                content.extend_from_slice(&len.to_le_bytes());
            }
            content.extend_from_slice(&tail);
            prop_assert!(decode_content(&content, 9, STORE).is_err());
            let _ = decode_content(&tail, 9, STORE);
            let _ = decode(&tail, 9, STORE, "c");
        }
    }
}
