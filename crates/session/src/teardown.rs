//! The release of a session's parts, in which no failure prevents a later step.

use crate::error::{Error, Result};

/// Collects the errors of the steps of a teardown. The caller carries out each step, whatever the
/// steps before it returned.
#[derive(Debug, Default)]
pub struct Teardown {
    errors: Vec<Error>,
}

impl Teardown {
    /// Creates a teardown whose cause is `error`, which its result reports first.
    pub fn after(error: Error) -> Self {
        Self { errors: vec![error] }
    }

    /// Notes the result of a step. Returns its value, or `None` if it failed.
    pub fn step<T, E: Into<Error>>(&mut self, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.errors.push(error.into())).ok()
    }

    /// Returns all errors in the order of their steps: one as it is, several as
    /// [`Error::Several`].
    pub fn finish(mut self) -> Result<()> {
        match self.errors.len() {
            0 => Ok(()),
            1 => Err(self.errors.remove(0)),
            _ => Err(Error::Several(self.errors)),
        }
    }

    /// Returns the errors as one. [`Error::NoVm`] stands for none, which cannot happen after a
    /// cause.
    pub fn into_error(self) -> Error {
        self.finish().err().unwrap_or(Error::NoVm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_carried_out_and_each_error_is_returned() {
        let mut teardown = Teardown::default();
        assert_eq!(teardown.step(Ok::<_, Error>(1)), Some(1));
        assert_eq!(teardown.step(Err::<u8, _>(Error::DisksNotServed)), None);
        assert_eq!(teardown.step(Ok::<_, Error>(2)), Some(2));
        assert_eq!(teardown.step(Err::<u8, _>(Error::EncoderPanicked)), None);
        let text = teardown.finish().unwrap_err().to_string();
        assert_eq!(text, "the disks are not served any more; the encoder's thread has failed");
    }

    #[test]
    fn one_error_keeps_its_type() {
        let teardown = Teardown::after(Error::Interrupted);
        assert!(matches!(teardown.finish(), Err(Error::Interrupted)));
        assert!(Teardown::default().finish().is_ok());
    }
}
