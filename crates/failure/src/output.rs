//! In transition.

pub use keyframe_units::{human_bytes as bytes, human_duration as duration, percentile};

/// Says, once in the life of this process, that a QEMU which was taken hold of would not have
/// survived our being killed meanwhile.
pub fn warn_unguarded(attached: &keyframe_kernel::attach::Attached, pid: u32) {
    static SAID: std::sync::Once = std::sync::Once::new();
    if let Some(text) = unguarded(attached.guarded, pid) {
        SAID.call_once(|| eprintln!("keyframe: warning: {text}"));
    }
}

/// What to say of a QEMU whose main thread was not `guarded` while it was taken hold of.
pub fn unguarded(guarded: bool, pid: u32) -> Option<String> {
    (!guarded).then(|| {
        format!(
            "QEMU (pid {pid}) lacks the code by which its main thread gives itself back should Keyframe be killed (SIGKILL, out \
             of memory) in the moment of taking hold of it: that would end QEMU. It went well this time; RAM that is \
             plugged in is taken hold of again"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_attach_that_was_not_guarded_is_warned_of() {
        assert_eq!(unguarded(true, 7), None);
        assert!(
            unguarded(false, 7)
                .is_some_and(|text| text.contains("pid 7") && text.contains("would end QEMU"))
        );
    }
}
