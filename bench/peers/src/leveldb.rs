//! LevelDB. Puts go to its log, and the last put of a checkpoint syncs the log. A Bloom filter avoids
//! reads for missing pages.

use keyframe_bench_feed::{Key, KeyValue, Result};
use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::path::Path;
use std::ptr::null_mut;

// Declarations of leveldb/c.h. Each handle is a pointer to an opaque object.
unsafe extern "C" {
    fn leveldb_options_create() -> *mut c_void;
    fn leveldb_options_set_create_if_missing(options: *mut c_void, value: c_uchar);
    fn leveldb_options_set_filter_policy(options: *mut c_void, policy: *mut c_void);
    fn leveldb_options_destroy(options: *mut c_void);
    fn leveldb_filterpolicy_create_bloom(bits_per_key: c_int) -> *mut c_void;
    fn leveldb_filterpolicy_destroy(policy: *mut c_void);
    fn leveldb_open(
        options: *const c_void,
        name: *const c_char,
        error: *mut *mut c_char,
    ) -> *mut c_void;
    fn leveldb_close(db: *mut c_void);
    fn leveldb_put(
        db: *mut c_void,
        options: *const c_void,
        key: *const u8,
        key_len: usize,
        value: *const u8,
        value_len: usize,
        error: *mut *mut c_char,
    );
    fn leveldb_get(
        db: *mut c_void,
        options: *const c_void,
        key: *const u8,
        key_len: usize,
        value_len: *mut usize,
        error: *mut *mut c_char,
    ) -> *mut u8;
    fn leveldb_writeoptions_create() -> *mut c_void;
    fn leveldb_writeoptions_set_sync(options: *mut c_void, value: c_uchar);
    fn leveldb_writeoptions_destroy(options: *mut c_void);
    fn leveldb_readoptions_create() -> *mut c_void;
    fn leveldb_readoptions_destroy(options: *mut c_void);
    fn leveldb_free(memory: *mut c_void);
}

/// The bits of the filter for each key.
const FILTER_BITS: c_int = 10;
/// The key that is put and synced after each checkpoint.
const MARK: &[u8] = b"checkpoint";

/// An open database.
pub struct LevelDb {
    db: *mut c_void,
    filter: *mut c_void,
    write: *mut c_void,
    write_synced: *mut c_void,
    read: *mut c_void,
}

/// Returns the library's error, if there is one.
fn check(operation: &str, error: *mut c_char) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: an error that is not null is a C string, which the caller frees once with `leveldb_free`.
    let text = unsafe {
        let text = CStr::from_ptr(error).to_string_lossy().into_owned();
        leveldb_free(error.cast());
        text
    };
    Err(LevelDb::failed(operation, text))
}

impl LevelDb {
    fn put(&mut self, key: &[u8], value: &[u8], synced: bool) -> Result<()> {
        let mut error = null_mut();
        let options = if synced { self.write_synced } else { self.write };
        // SAFETY: `db` and the options are open until `drop`; pointers and lengths are those of
        // slices, which the call copies.
        unsafe {
            leveldb_put(
                self.db,
                options,
                key.as_ptr(),
                key.len(),
                value.as_ptr(),
                value.len(),
                &mut error,
            );
        }
        check("put", error)
    }
}

impl KeyValue for LevelDb {
    const NAME: &'static str = "leveldb";

    fn open(dir: &Path) -> Result<Self> {
        let name = CString::new(dir.as_os_str().as_encoded_bytes())
            .map_err(|e| Self::failed("open", e))?;
        let mut error = null_mut();
        // SAFETY: the handles are made here; the options are not used after they are destroyed, and
        // the filter stays until `drop`, after the database. `name` ends with a zero and outlives
        // the call.
        let this = unsafe {
            let filter = leveldb_filterpolicy_create_bloom(FILTER_BITS);
            let options = leveldb_options_create();
            leveldb_options_set_create_if_missing(options, 1);
            leveldb_options_set_filter_policy(options, filter);
            let db = leveldb_open(options, name.as_ptr(), &mut error);
            leveldb_options_destroy(options);
            let write_synced = leveldb_writeoptions_create();
            leveldb_writeoptions_set_sync(write_synced, 1);
            let (write, read) = (leveldb_writeoptions_create(), leveldb_readoptions_create());
            Self { db, filter, write, write_synced, read }
        };
        check("open", error).map(|()| this)
    }

    fn add_all(&mut self, entries: &mut dyn Iterator<Item = (Key, &[u8])>) -> Result<()> {
        for (key, value) in entries {
            if !self.get(&key, &mut |_| ())? {
                self.put(&key, value, false)?;
            }
        }
        // This syncs the log with all puts before.
        self.put(MARK, &[], true)
    }

    fn get(&mut self, key: &Key, sink: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let (mut error, mut len) = (null_mut(), 0);
        // SAFETY: `db` and `read` are open until `drop`; the key's pointer and length are those of
        // a slice.
        let value = unsafe {
            leveldb_get(self.db, self.read, key.as_ptr(), key.len(), &mut len, &mut error)
        };
        check("get", error)?;
        if value.is_null() {
            return Ok(false);
        }
        // SAFETY: the value is not null, has `len` bytes and is ours; it is freed once, after its
        // last use.
        unsafe {
            sink(std::slice::from_raw_parts(value, len));
            leveldb_free(value.cast());
        }
        Ok(true)
    }

    fn close(self) -> Result<()> {
        Ok(())
    }
}

impl Drop for LevelDb {
    fn drop(&mut self) {
        // SAFETY: each handle is destroyed once, here, the filter after the database that uses it;
        // `db` is null if opening failed.
        unsafe {
            if !self.db.is_null() {
                leveldb_close(self.db);
            }
            leveldb_filterpolicy_destroy(self.filter);
            leveldb_writeoptions_destroy(self.write);
            leveldb_writeoptions_destroy(self.write_synced);
            leveldb_readoptions_destroy(self.read);
        }
    }
}
