//! RocksDB. Puts go to its log, which is synced at the end of a checkpoint. A Bloom filter avoids
//! reads for missing pages.

use keyframe_bench_feed::{Key, KeyValue, Result};
use std::ffi::{CStr, CString, c_char, c_double, c_uchar, c_void};
use std::path::Path;
use std::ptr::null_mut;

// Declarations of rocksdb/c.h. Each handle is a pointer to an opaque object.
unsafe extern "C" {
    fn rocksdb_options_create() -> *mut c_void;
    fn rocksdb_options_set_create_if_missing(options: *mut c_void, value: c_uchar);
    fn rocksdb_options_set_block_based_table_factory(options: *mut c_void, table: *mut c_void);
    fn rocksdb_options_destroy(options: *mut c_void);
    fn rocksdb_block_based_options_create() -> *mut c_void;
    fn rocksdb_block_based_options_set_filter_policy(table: *mut c_void, policy: *mut c_void);
    fn rocksdb_block_based_options_destroy(table: *mut c_void);
    fn rocksdb_filterpolicy_create_bloom(bits_per_key: c_double) -> *mut c_void;
    fn rocksdb_open(
        options: *const c_void,
        name: *const c_char,
        error: *mut *mut c_char,
    ) -> *mut c_void;
    fn rocksdb_close(db: *mut c_void);
    fn rocksdb_put(
        db: *mut c_void,
        options: *const c_void,
        key: *const u8,
        key_len: usize,
        value: *const u8,
        value_len: usize,
        error: *mut *mut c_char,
    );
    fn rocksdb_get_pinned(
        db: *mut c_void,
        options: *const c_void,
        key: *const u8,
        key_len: usize,
        error: *mut *mut c_char,
    ) -> *mut c_void;
    fn rocksdb_pinnableslice_value(slice: *const c_void, len: *mut usize) -> *const u8;
    fn rocksdb_pinnableslice_destroy(slice: *mut c_void);
    fn rocksdb_writeoptions_create() -> *mut c_void;
    fn rocksdb_writeoptions_destroy(options: *mut c_void);
    fn rocksdb_readoptions_create() -> *mut c_void;
    fn rocksdb_readoptions_destroy(options: *mut c_void);
    fn rocksdb_flush_wal(db: *mut c_void, sync: c_uchar, error: *mut *mut c_char);
    fn rocksdb_free(memory: *mut c_void);
}

/// The bits of the filter for each key.
const FILTER_BITS: c_double = 10.0;

/// An open database.
pub struct RocksDb {
    db: *mut c_void,
    write: *mut c_void,
    read: *mut c_void,
}

/// Returns the library's error, if there is one.
fn check(operation: &str, error: *mut c_char) -> Result<()> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: an error that is not null is a C string, which the caller frees once with `rocksdb_free`.
    let text = unsafe {
        let text = CStr::from_ptr(error).to_string_lossy().into_owned();
        rocksdb_free(error.cast());
        text
    };
    Err(RocksDb::failed(operation, text))
}

impl RocksDb {
    fn put(&mut self, key: &Key, value: &[u8]) -> Result<()> {
        let mut error = null_mut();
        // SAFETY: `db` and `write` are open until `drop`; pointers and lengths are those of slices,
        // which the call copies.
        unsafe {
            rocksdb_put(
                self.db,
                self.write,
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

impl KeyValue for RocksDb {
    const NAME: &'static str = "rocksdb";

    fn open(dir: &Path) -> Result<Self> {
        let name = CString::new(dir.as_os_str().as_encoded_bytes())
            .map_err(|e| Self::failed("open", e))?;
        let mut error = null_mut();
        // SAFETY: the handles are made here; those that are destroyed are not used after. The table
        // takes over the filter policy. `name` ends with a zero and outlives the call.
        let (db, write, read) = unsafe {
            let table = rocksdb_block_based_options_create();
            rocksdb_block_based_options_set_filter_policy(
                table,
                rocksdb_filterpolicy_create_bloom(FILTER_BITS),
            );
            let options = rocksdb_options_create();
            rocksdb_options_set_create_if_missing(options, 1);
            rocksdb_options_set_block_based_table_factory(options, table);
            let db = rocksdb_open(options, name.as_ptr(), &mut error);
            rocksdb_options_destroy(options);
            rocksdb_block_based_options_destroy(table);
            (db, rocksdb_writeoptions_create(), rocksdb_readoptions_create())
        };
        let this = Self { db, write, read };
        check("open", error).map(|()| this)
    }

    fn add_all(&mut self, entries: &mut dyn Iterator<Item = (Key, &[u8])>) -> Result<()> {
        for (key, value) in entries {
            if !self.get(&key, &mut |_| ())? {
                self.put(&key, value)?;
            }
        }
        let mut error = null_mut();
        // SAFETY: `db` is open until `drop`.
        unsafe { rocksdb_flush_wal(self.db, 1, &mut error) };
        check("sync", error)
    }

    fn get(&mut self, key: &Key, sink: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let (mut error, mut len) = (null_mut(), 0);
        // SAFETY: `db` and `read` are open until `drop`; the key's pointer and length are those of
        // a slice.
        let slice =
            unsafe { rocksdb_get_pinned(self.db, self.read, key.as_ptr(), key.len(), &mut error) };
        check("get", error)?;
        if slice.is_null() {
            return Ok(false);
        }
        // SAFETY: the slice is not null, and its value, of `len` bytes, stays until it is
        // destroyed, which is after the last use.
        unsafe {
            let value = rocksdb_pinnableslice_value(slice, &mut len);
            sink(std::slice::from_raw_parts(value, len));
            rocksdb_pinnableslice_destroy(slice);
        }
        Ok(true)
    }

    fn close(self) -> Result<()> {
        Ok(())
    }
}

impl Drop for RocksDb {
    fn drop(&mut self) {
        // SAFETY: each handle is destroyed once, here; `db` is null if opening failed.
        unsafe {
            if !self.db.is_null() {
                rocksdb_close(self.db);
            }
            rocksdb_writeoptions_destroy(self.write);
            rocksdb_readoptions_destroy(self.read);
        }
    }
}
