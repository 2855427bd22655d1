//! The names of the files of a store, and the numbers in them.
//!
//! ```text
//!   store.json   packs/00000001.pack   maps/0000000012.map   checkpoints/0000000012.ckpt
//!   tags/NAME    worksets/0000000012.wset   tmp/...
//!   files/HASH   files/manifest.json        (in bundles alone)
//! ```

use keyframe_units::CheckpointId;

/// The file that makes a directory a store: its identity and its keys.
pub const STORE_JSON: &str = "store.json";
/// The folder of the packs, which hold page contents.
pub const PACKS: &str = "packs";
/// The folder of the maps, which tell where each page's content is.
pub const MAPS: &str = "maps";
/// The folder of the sealed checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// The folder of the tags: names of checkpoints.
pub const TAGS: &str = "tags";
/// The folder of the working sets, which tell which pages a restored VM touched first.
pub const WORKSETS: &str = "worksets";
/// The folder of files that a bundle holds beside its checkpoint: kernels, firmware, CDs.
pub const FILES: &str = "files";
/// The file that describes the files of a bundle.
pub const MANIFEST: &str = "files/manifest.json";
/// The folder of files that are being written.
pub const TMP: &str = "tmp";
/// The folder of the writers' slots, which the first writer makes.
pub const WRITERS: &str = "writers";
/// The folders that a new store has.
pub const FOLDERS: [&str; 6] = [PACKS, MAPS, CHECKPOINTS, TAGS, WORKSETS, TMP];
/// The folders whose files readers ask for.
pub const READ_FOLDERS: [&str; 5] = [PACKS, MAPS, CHECKPOINTS, TAGS, WORKSETS];

/// Tags with this prefix are the store's own: `pin.12` keeps checkpoint 12.
pub const PIN_PREFIX: &str = "pin.";
/// The word that always names the newest checkpoint.
pub const LATEST: &str = "latest";
const TAG_CHARS_MAX: usize = 64;

/// Returns the name of the file of pack `number`, with its folder.
pub fn pack(number: u32) -> String {
    format!("{PACKS}/{}", pack_file(number))
}

/// Returns the name of the file of map `id`, with its folder.
pub fn map(id: u64) -> String {
    format!("{MAPS}/{}", map_file(id))
}

/// Returns the name of the file of checkpoint `id`, with its folder.
pub fn checkpoint(id: CheckpointId) -> String {
    format!("{CHECKPOINTS}/{}", checkpoint_file(id.0))
}

/// Returns the name of the file with the working set of checkpoint `id`, with its folder.
pub fn workset(id: CheckpointId) -> String {
    format!("{WORKSETS}/{:010}.wset", id.0)
}

/// Returns the checkpoint that the file name `file` of a working set names; `None` if it is no such
/// name.
pub fn parse_workset(file: &str) -> Option<CheckpointId> {
    let id = CheckpointId(file.strip_suffix(".wset")?.parse().ok()?);
    (workset(id).strip_prefix(WORKSETS)?.strip_prefix('/')? == file).then_some(id)
}

/// Returns the name of the file of tag `tag`, with its folder.
pub fn tag(tag: &str) -> String {
    format!("{TAGS}/{tag}")
}

/// Returns the name of the file of slot `number` of a writer, with its folder.
pub fn writer(number: u32) -> String {
    format!("{WRITERS}/{number:02}")
}

/// Returns the number in the file name `file` of a writer's slot; `None` if it is no such name.
pub fn parse_writer(file: &str) -> Option<u32> {
    let number = file.parse().ok()?;
    (format!("{number:02}") == file).then_some(number)
}

fn pack_file(number: u32) -> String {
    format!("{number:08}.pack")
}

fn map_file(id: u64) -> String {
    format!("{id:010}.map")
}

fn checkpoint_file(id: u64) -> String {
    format!("{id:010}.ckpt")
}

/// Returns the number in the file name `file` of a pack; `None` if it is no such name.
pub fn parse_pack(file: &str) -> Option<u32> {
    let number = file.strip_suffix(".pack")?.parse().ok()?;
    (number > 0 && pack_file(number) == file).then_some(number)
}

/// Returns the number in the file name `file` of a map; `None` if it is no such name.
pub fn parse_map(file: &str) -> Option<u64> {
    let id = file.strip_suffix(".map")?.parse().ok()?;
    (id > 0 && map_file(id) == file).then_some(id)
}

/// Returns the number in the file name `file` of a checkpoint; `None` if it is no such name.
pub fn parse_checkpoint(file: &str) -> Option<CheckpointId> {
    let id = file.strip_suffix(".ckpt")?.parse().ok()?;
    (id > 0 && checkpoint_file(id) == file).then_some(CheckpointId(id))
}

/// Returns true if `name` is `store.json` or a file of [`READ_FOLDERS`]. No such name leads out of
/// the store.
pub fn is_file(name: &str) -> bool {
    match name.split_once('/') {
        None => name == STORE_JSON,
        Some((PACKS, file)) => parse_pack(file).is_some(),
        Some((MAPS, file)) => parse_map(file).is_some(),
        Some((CHECKPOINTS, file)) => parse_checkpoint(file).is_some(),
        Some((TAGS, file)) => is_tag(file),
        Some((WORKSETS, file)) => parse_workset(file).is_some(),
        Some(_) => false,
    }
}

/// The file in which a prune tells the writers which packs it removes.
pub const MOVES: &str = "moves";
/// The mark of checkpoints of writers that have ended, which may not be durable.
pub const UNSYNCED: &str = "unsynced";
/// The mark of unfinished packs of writers that have ended, which may not be durable.
pub const UNSYNCED_PACKS: &str = "unsynced.packs";
/// The endings of the names of a writer's own marks, after the name of its slot.
pub const MARK_ENDINGS: [&str; 2] = [".unsynced", ".packs"];

/// Returns the slot whose mark the file `name` is; `None` if it is no such name.
pub fn parse_mark(name: &str) -> Option<u32> {
    let file = name.strip_prefix(WRITERS)?.strip_prefix('/')?;
    MARK_ENDINGS.iter().find_map(|ending| parse_writer(file.strip_suffix(ending)?))
}

/// Returns true if `name` is a file that writers read to go on beside each other. No such name
/// leads out of the store.
pub fn is_between_writers(name: &str) -> bool {
    [MOVES, UNSYNCED, UNSYNCED_PACKS].contains(&name) || parse_mark(name).is_some()
}

/// Returns the name, with its folder, of the file of a bundle whose content has the BLAKE3 hash `hash`
/// (64 hexadecimal digits).
pub fn bundled_file(hash: &str) -> String {
    format!("{FILES}/{hash}")
}

/// Returns true if `name` is a file that a bundle holds. No such name leads out of the store.
pub fn is_archived(name: &str) -> bool {
    let is_hash = |file: &str| file.len() == 64 && file.bytes().all(|c| c.is_ascii_hexdigit());
    let is_bundled = name.strip_prefix("files/").is_some_and(is_hash);
    name == MANIFEST || is_bundled || is_file(name) && !name.starts_with(WORKSETS)
}

/// Returns true if `text` can be a tag: 1 to 64 letters, digits, dots, dashes or underscores, but
/// neither a number, nor dots alone, nor `latest`.
pub fn is_tag(text: &str) -> bool {
    let chars_fit = text.bytes().all(|c| c.is_ascii_alphanumeric() || b"._-".contains(&c));
    let dots = text.bytes().all(|c| c == b'.');
    let digits = text.bytes().all(|c| c.is_ascii_digit());
    (1..=TAG_CHARS_MAX).contains(&text.len()) && chars_fit && !dots && !digits && text != LATEST
}

/// Returns the tag that pins a checkpoint.
pub fn pin(id: CheckpointId) -> String {
    format!("{PIN_PREFIX}{id}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tags_are_told_from_numbers_paths_and_words() {
        for good in ["a", "before-upgrade", "v1.2_3", "0x10", "Latest", &"x".repeat(64)] {
            assert!(is_tag(good), "{good}");
        }
        for bad in ["", "12", "latest", ".", "..", "a/b", "ä", "a b", "a\n", &"x".repeat(65)] {
            assert!(!is_tag(bad), "{bad:?}");
        }
    }

    #[test]
    fn files_of_a_store_are_told_from_paths_to_elsewhere() {
        for good in [
            "store.json",
            "packs/00000001.pack",
            "maps/0000000001.map",
            "tags/a",
            "worksets/0000000001.wset",
        ] {
            assert!(is_file(good), "{good}");
        }
        for bundled in
            ["files/manifest.json", &bundled_file(&"0a".repeat(32)), "packs/00000001.pack"]
        {
            assert!(is_archived(bundled), "{bundled}");
        }
        for other in ["files/../lock", "files/", "files/0a", "worksets/0000000001.wset", "lock"] {
            assert!(!is_archived(other), "{other}");
        }
        for between in ["moves", "unsynced", "unsynced.packs", "writers/07.packs"] {
            assert!(is_between_writers(between) && !is_file(between), "{between}");
        }
        for other in ["writers/07", "writers/7.packs", "writers/../07.packs", "writers/start"] {
            assert!(!is_between_writers(other), "{other}");
        }
        for bad in [
            "",
            "/",
            "lock",
            "packs",
            "packs/",
            "packs/1.pack",
            "packs/../store.json",
            "packs//etc/passwd",
            "../store.json",
            "tags/..",
            "tags/../lock",
            "tags/a/b",
            "tmp/x",
            "/etc/passwd",
            "disks/vm.1/a",
            "store.json/",
            "tags/a\0",
        ] {
            assert!(!is_file(bad), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn no_name_of_a_file_leads_out(name in "[a-z0-9./]{0,30}") {
            prop_assert!(!is_file(&name) || !name.contains("..") && !name.starts_with('/'));
        }

        #[test]
        fn numbers_come_back_and_nothing_else_is_one(id in 1u64.., file in "[+0-9a-z.]{0,16}", pack_number in 1u32..) {
            prop_assert_eq!(parse_checkpoint(&checkpoint_file(id)), Some(CheckpointId(id)));
            prop_assert_eq!(parse_map(&map_file(id)), Some(id));
            prop_assert_eq!(parse_pack(&pack_file(pack_number)), Some(pack_number));
            for name in [format!("{file}.ckpt"), file] {
                if let Some(id) = parse_checkpoint(&name) {
                    prop_assert_eq!(checkpoint_file(id.0), name);
                }
            }
        }
    }
}
