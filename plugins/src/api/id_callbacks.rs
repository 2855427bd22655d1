//! Callbacks of interfaces 1 and 4: QEMU hands them the plugin's id.

use super::{Events, PluginId, RawBlock};
use std::ffi::{c_uint, c_void};

pub(super) type TranslatedCallback = extern "C" fn(PluginId, *mut RawBlock);
pub(super) type AtExitCallback = extern "C" fn(PluginId, *mut c_void);
pub(super) type VcpuCallback = extern "C" fn(PluginId, c_uint);

#[cfg(any(keyframe_interface = "1", keyframe_interface = "4"))]
unsafe extern "C" {
    fn qemu_plugin_register_vcpu_tb_trans_cb(id: PluginId, callback: TranslatedCallback);
    fn qemu_plugin_register_atexit_cb(id: PluginId, callback: AtExitCallback, data: *mut c_void);
    fn qemu_plugin_register_vcpu_init_cb(id: PluginId, callback: VcpuCallback);
}

#[cfg(not(any(keyframe_interface = "1", keyframe_interface = "4")))]
use super::none::{
    qemu_plugin_register_atexit_cb, qemu_plugin_register_vcpu_init_cb,
    qemu_plugin_register_vcpu_tb_trans_cb,
};

extern "C" fn vcpu<T: Events>(_id: PluginId, vcpu: c_uint) {
    T::vcpu(vcpu);
}

extern "C" fn translated<T: Events>(_id: PluginId, block: *mut RawBlock) {
    T::translated(block);
}

extern "C" fn exit<T: Events>(_id: PluginId, _data: *mut c_void) {
    T::exit();
}

/// Registers the callbacks of `T`.
pub fn register<T: Events>(id: PluginId) {
    // SAFETY: `id` is that of this plugin, and the callbacks are functions of this library, which
    // stays loaded. No data is handed over.
    unsafe {
        qemu_plugin_register_vcpu_init_cb(id, vcpu::<T>);
        qemu_plugin_register_vcpu_tb_trans_cb(id, translated::<T>);
        qemu_plugin_register_atexit_cb(id, exit::<T>, std::ptr::null_mut());
    }
}
