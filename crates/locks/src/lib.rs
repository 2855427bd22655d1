//! Locks whose data stays usable after a thread that held them panicked.
//!
//! The standard library marks a lock as poisoned if a thread panics while it holds the lock. The
//! engine must still end the pause and release the VM then, so its code reads on:
//!
//! ```
//! use keyframe_locks::IgnorePoison;
//!
//! let count = std::sync::Mutex::new(1);
//! *count.lock().ignore_poison() += 1;
//! assert_eq!(count.into_inner().ignore_poison(), 2);
//! ```
//!
//! Code that uses it must leave the data consistent at each point that can panic.

use std::sync::{LockResult, PoisonError};

/// Takes the guard or the value out of the result of a lock, a wait or an `into_inner`.
pub trait IgnorePoison {
    /// The guard or the value.
    type Guard;

    /// Returns the guard or the value, poisoned or not.
    fn ignore_poison(self) -> Self::Guard;
}

impl<G> IgnorePoison for LockResult<G> {
    type Guard = G;

    fn ignore_poison(self) -> G {
        self.unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, RwLock};

    #[test]
    fn a_lock_opens_after_its_holder_panicked() {
        let (mutex, rwlock) = (Mutex::new(1), RwLock::new(2));
        let panicked = std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = (mutex.lock().unwrap(), rwlock.write().unwrap());
                panic!("the holder panics");
            });
            holder.join().is_err()
        });
        assert!(panicked && mutex.is_poisoned() && rwlock.is_poisoned());
        assert_eq!(*mutex.lock().ignore_poison(), 1);
        assert_eq!(*rwlock.read().ignore_poison(), 2);
        assert_eq!(mutex.into_inner().ignore_poison(), 1);
    }
}
