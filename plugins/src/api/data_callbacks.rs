//! Callbacks of interface 7: QEMU hands them the data that they were registered with, and not the
//! plugin's id.

use super::{Events, PluginId, RawBlock};
use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;

type TranslatedCallback = extern "C" fn(*mut RawBlock, *mut c_void);
type AtExitCallback = extern "C" fn(*mut c_void);
type VcpuCallback = extern "C" fn(c_uint, *mut c_void);

unsafe extern "C" {
    fn qemu_plugin_register_vcpu_tb_trans_cb(
        id: PluginId,
        callback: TranslatedCallback,
        data: *mut c_void,
    );
    fn qemu_plugin_register_atexit_cb(id: PluginId, callback: AtExitCallback, data: *mut c_void);
    fn qemu_plugin_register_vcpu_init_cb(id: PluginId, callback: VcpuCallback, data: *mut c_void);
}

extern "C" fn vcpu<T: Events>(vcpu: c_uint, _data: *mut c_void) {
    T::vcpu(vcpu);
}

extern "C" fn translated<T: Events>(block: *mut RawBlock, _data: *mut c_void) {
    T::translated(block);
}

extern "C" fn exit<T: Events>(_data: *mut c_void) {
    T::exit();
}

/// Registers the callbacks of `T`.
pub fn register<T: Events>(id: PluginId) {
    // SAFETY: `id` is that of this plugin, and the callbacks are functions of this library, which
    // stays loaded. No data is handed over.
    unsafe {
        qemu_plugin_register_vcpu_init_cb(id, vcpu::<T>, null_mut());
        qemu_plugin_register_vcpu_tb_trans_cb(id, translated::<T>, null_mut());
        qemu_plugin_register_atexit_cb(id, exit::<T>, null_mut());
    }
}
