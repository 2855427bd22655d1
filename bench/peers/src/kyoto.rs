//! Kyoto Cabinet's hash database. A synchronization with the medium ends each checkpoint.

use keyframe_bench_feed::{Key, KeyValue, Result};
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::null_mut;

// Declarations of kclangc.h.
unsafe extern "C" {
    fn kcdbnew() -> *mut c_void;
    fn kcdbdel(db: *mut c_void);
    fn kcdbopen(db: *mut c_void, path: *const c_char, mode: u32) -> i32;
    fn kcdbclose(db: *mut c_void) -> i32;
    fn kcdbecode(db: *mut c_void) -> i32;
    fn kcdbemsg(db: *mut c_void) -> *const c_char;
    fn kcdbadd(
        db: *mut c_void,
        key: *const u8,
        key_len: usize,
        value: *const u8,
        value_len: usize,
    ) -> i32;
    fn kcdbget(db: *mut c_void, key: *const u8, key_len: usize, value_len: *mut usize) -> *mut u8;
    fn kcdbsync(db: *mut c_void, hard: i32, proc: *mut c_void, opaque: *mut c_void) -> i32;
    fn kcfree(memory: *mut c_void);
}

/// `KCOWRITER | KCOCREATE`.
const MODE: u32 = (1 << 1) | (1 << 2);
/// `KCEDUPREC`: the key exists.
const EXISTS: i32 = 6;
/// `KCENOREC`: the key is missing.
const MISSING: i32 = 7;

/// An open database.
pub struct Kyoto {
    db: *mut c_void,
}

impl Kyoto {
    /// Returns the error of the last call, unless it is `expected`.
    fn last_error(&self, operation: &str, expected: Option<i32>) -> Result<()> {
        // SAFETY: `db` is a database until `drop`; its message is a C string, copied before the
        // next call.
        let (code, text) = unsafe {
            (kcdbecode(self.db), CStr::from_ptr(kcdbemsg(self.db)).to_string_lossy().into_owned())
        };
        if expected == Some(code) { Ok(()) } else { Err(Self::failed(operation, text)) }
    }
}

impl KeyValue for Kyoto {
    const NAME: &'static str = "kyoto";

    fn open(dir: &Path) -> Result<Self> {
        let path = dir.join("pages.kch");
        let path = CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|e| Self::failed("open", e))?;
        // SAFETY: the library gives a database, which `drop` deletes.
        let this = Self { db: unsafe { kcdbnew() } };
        // SAFETY: `path` ends with a zero and outlives the call.
        match unsafe { kcdbopen(this.db, path.as_ptr(), MODE) } {
            0 => this.last_error("open", None).map(|()| this),
            _ => Ok(this),
        }
    }

    fn add_all(&mut self, entries: &mut dyn Iterator<Item = (Key, &[u8])>) -> Result<()> {
        for (key, value) in entries {
            // SAFETY: the database is open; pointers and lengths are those of slices, which the
            // call copies.
            let added =
                unsafe { kcdbadd(self.db, key.as_ptr(), key.len(), value.as_ptr(), value.len()) };
            if added == 0 {
                self.last_error("add", Some(EXISTS))?;
            }
        }
        // SAFETY: the database is open, and no processor is given.
        match unsafe { kcdbsync(self.db, 1, null_mut(), null_mut()) } {
            0 => self.last_error("sync", None),
            _ => Ok(()),
        }
    }

    fn get(&mut self, key: &Key, sink: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let mut len = 0;
        // SAFETY: the database is open; the key's pointer and length are those of a slice.
        let value = unsafe { kcdbget(self.db, key.as_ptr(), key.len(), &mut len) };
        if value.is_null() {
            return self.last_error("get", Some(MISSING)).map(|()| false);
        }
        // SAFETY: the value is not null, has `len` bytes and is ours; it is freed once, after its
        // last use.
        unsafe {
            sink(std::slice::from_raw_parts(value, len));
            kcfree(value.cast());
        }
        Ok(true)
    }

    fn close(self) -> Result<()> {
        // SAFETY: the database is open; deleting it in `drop` is allowed after.
        match unsafe { kcdbclose(self.db) } {
            0 => self.last_error("close", None),
            _ => Ok(()),
        }
    }
}

impl Drop for Kyoto {
    fn drop(&mut self) {
        // SAFETY: it was made by `kcdbnew` and is deleted once; deleting an open one closes it.
        unsafe { kcdbdel(self.db) }
    }
}
