//! LMDB. A checkpoint is one write transaction, whose commit syncs.

use keyframe_bench_feed::{Key, KeyValue, Result};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::null_mut;

/// `MDB_val`.
#[repr(C)]
struct Value {
    len: usize,
    data: *const u8,
}

// Declarations of lmdb.h.
unsafe extern "C" {
    fn mdb_env_create(env: *mut *mut c_void) -> c_int;
    fn mdb_env_set_mapsize(env: *mut c_void, bytes: usize) -> c_int;
    fn mdb_env_open(env: *mut c_void, path: *const c_char, flags: c_uint, mode: c_uint) -> c_int;
    fn mdb_env_close(env: *mut c_void);
    fn mdb_txn_begin(
        env: *mut c_void,
        parent: *mut c_void,
        flags: c_uint,
        txn: *mut *mut c_void,
    ) -> c_int;
    fn mdb_txn_commit(txn: *mut c_void) -> c_int;
    fn mdb_txn_abort(txn: *mut c_void);
    fn mdb_dbi_open(
        txn: *mut c_void,
        name: *const c_char,
        flags: c_uint,
        dbi: *mut c_uint,
    ) -> c_int;
    fn mdb_put(
        txn: *mut c_void,
        dbi: c_uint,
        key: *mut Value,
        value: *mut Value,
        flags: c_uint,
    ) -> c_int;
    fn mdb_get(txn: *mut c_void, dbi: c_uint, key: *mut Value, value: *mut Value) -> c_int;
    fn mdb_strerror(error: c_int) -> *const c_char;
}

const READ_ONLY: c_uint = 0x20000;
const NO_OVERWRITE: c_uint = 0x10;
const KEY_EXISTS: c_int = -30799;
const NOT_FOUND: c_int = -30798;
/// The address space of the map. Memory is allocated when it is used.
const MAP_BYTES: usize = 64 << 30;
const MODE: c_uint = 0o600;

/// An open database.
pub struct Lmdb {
    env: *mut c_void,
    dbi: c_uint,
    /// The read transaction; null before the first read.
    reading: *mut c_void,
}

fn check(operation: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the library returns a C string for every number.
    let text = unsafe { CStr::from_ptr(mdb_strerror(code)) };
    Err(Lmdb::failed(operation, text.to_string_lossy()))
}

fn value(bytes: &[u8]) -> Value {
    Value { len: bytes.len(), data: bytes.as_ptr() }
}

impl Lmdb {
    fn begin(&self, flags: c_uint) -> Result<*mut c_void> {
        let mut txn = null_mut();
        // SAFETY: `env` is open until `drop`.
        check("begin a transaction", unsafe {
            mdb_txn_begin(self.env, null_mut(), flags, &mut txn)
        })?;
        Ok(txn)
    }

    /// Puts all entries in a transaction, which the caller ends.
    fn put_all(
        &self,
        txn: *mut c_void,
        entries: &mut dyn Iterator<Item = (Key, &[u8])>,
    ) -> Result<()> {
        for (key, content) in entries {
            let (mut key, mut content) = (value(&key), value(content));
            // SAFETY: the transaction is a write transaction that has not ended; both values point
            // to slices, which the call copies.
            match unsafe { mdb_put(txn, self.dbi, &mut key, &mut content, NO_OVERWRITE) } {
                KEY_EXISTS => {}
                code => check("put", code)?,
            }
        }
        Ok(())
    }
}

impl KeyValue for Lmdb {
    const NAME: &'static str = "lmdb";

    fn open(dir: &Path) -> Result<Self> {
        let path = CString::new(dir.as_os_str().as_encoded_bytes())
            .map_err(|e| Self::failed("open", e))?;
        let mut this = Self { env: null_mut(), dbi: 0, reading: null_mut() };
        // SAFETY: the environment is made here, and nothing else uses it before `drop` closes it;
        // `path` ends with a zero and outlives the call.
        unsafe {
            check("make an environment", mdb_env_create(&mut this.env))?;
            check("size the map", mdb_env_set_mapsize(this.env, MAP_BYTES))?;
            check("open", mdb_env_open(this.env, path.as_ptr(), 0, MODE))?;
        }
        let txn = this.begin(0)?;
        // SAFETY: the transaction was begun just now and ends here; without a name it is the main
        // database.
        unsafe {
            let opened = mdb_dbi_open(txn, std::ptr::null(), 0, &mut this.dbi);
            check("open the main database", opened).inspect_err(|_| mdb_txn_abort(txn))?;
            check("commit", mdb_txn_commit(txn))?;
        }
        Ok(this)
    }

    fn add_all(&mut self, entries: &mut dyn Iterator<Item = (Key, &[u8])>) -> Result<()> {
        let txn = self.begin(0)?;
        // SAFETY: the transaction has not ended; it ends here one way or the other.
        self.put_all(txn, entries).inspect_err(|_| unsafe { mdb_txn_abort(txn) })?;
        // SAFETY: as above.
        check("commit", unsafe { mdb_txn_commit(txn) })
    }

    fn get(&mut self, key: &Key, sink: &mut dyn FnMut(&[u8])) -> Result<bool> {
        if self.reading.is_null() {
            self.reading = self.begin(READ_ONLY)?;
        }
        let (mut key, mut found) = (value(key), value(&[]));
        // SAFETY: the transaction ends in `drop` only; the key points to a slice.
        match unsafe { mdb_get(self.reading, self.dbi, &mut key, &mut found) } {
            NOT_FOUND => Ok(false),
            code => {
                check("get", code)?;
                // SAFETY: the value lies in the map, and does not change while the transaction is
                // open.
                sink(unsafe { std::slice::from_raw_parts(found.data, found.len) });
                Ok(true)
            }
        }
    }

    fn close(self) -> Result<()> {
        Ok(())
    }
}

impl Drop for Lmdb {
    fn drop(&mut self) {
        // SAFETY: transaction and environment end once, here, in this order; what is null was never
        // made.
        unsafe {
            if !self.reading.is_null() {
                mdb_txn_abort(self.reading);
            }
            if !self.env.is_null() {
                mdb_env_close(self.env);
            }
        }
    }
}
