//! The place of a fake VM, which another fake VM takes.

use super::{FakeState, FakeVm, Step, enter};
use crate::{Succession, SuccessorState, Vmm, VmmError, VmmErrorKind};
use keyframe_units::{PageIndex, PageRange};
use std::sync::{Arc, Mutex};

/// The place of a [`FakeVm`].
pub(super) struct FakeSuccession {
    pub predecessor: Arc<Mutex<FakeState>>,
}

impl Succession for FakeSuccession {
    fn prepare(&mut self, _: &SuccessorState<'_>, _: bool) -> Result<(), VmmError> {
        enter(&self.predecessor, Step::PrepareSuccessor).enter(Step::PrepareSuccessor).map(drop)
    }

    fn end_predecessor(&mut self) -> Result<(), VmmError> {
        let mut state = enter(&self.predecessor, Step::EndPredecessor);
        state.enter(Step::EndPredecessor)?;
        state.kill();
        Ok(())
    }

    fn start(&mut self, state: &SuccessorState<'_>) -> Result<Box<dyn Vmm>, VmmError> {
        enter(&self.predecessor, Step::StartSuccessor).enter(Step::StartSuccessor)?;
        let len_pages = state.source.ram.len_pages();
        let (vm, _, control) = FakeVm::new(usize::try_from(len_pages).unwrap_or_default());
        let all = PageRange::new(PageIndex(0), len_pages);
        let mut write = |page: PageIndex, content: &_| {
            control.write_page(page, content);
            Ok(())
        };
        state.ram.read(all, &mut write).map_err(|e| VmmError::new(VmmErrorKind::Other, e, None))?;
        control.pause();
        Ok(Box::new(vm))
    }
}
