//! Which device there is, whether this MLX is the one we were built for, and what fits on it.

use std::ffi::CStr;

use loaf_formats::plan::{Plan, StateKind};
use mlx_sys as sys;

use super::array::{MlxError, Result, catch_errors, check};
use super::ops::Mlx;

/// The version of MLX that the bindings belong to.
pub const VERSION: &str = "0.32.2";

/// Where MLX computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The CPU: for comparing, not for speed.
    Cpu,
    /// Apple's GPUs.
    Metal,
    /// NVIDIA's GPUs.
    Cuda,
}

impl Device {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Metal => "metal",
            Device::Cuda => "cuda",
        }
    }
}

/// A string that MLX fills in.
fn text(fill: impl FnOnce(*mut sys::mlx_string) -> i32) -> Result<String> {
    // SAFETY: no preconditions; the string is freed once, after its bytes were copied.
    unsafe {
        let mut s = sys::mlx_string_new();
        let status = fill(&mut s);
        let data = sys::mlx_string_data(s);
        let text = if data.is_null() { String::new() } else { CStr::from_ptr(data).to_string_lossy().into_owned() };
        sys::mlx_string_free(s);
        check(status).map(|()| text)
    }
}

/// Refuses another MLX than ours: the C functions would not be the ones that were declared.
pub fn check_version(found: &str) -> Result<()> {
    // A development build adds a suffix.
    if found == VERSION || found.strip_prefix(VERSION).is_some_and(|rest| rest.starts_with(['.', '+'])) {
        return Ok(());
    }
    Err(MlxError(format!("expected version {VERSION}, found {found}")))
}

/// Opens a device: the GPU, or the CPU if that is asked for (or named by a build that has nothing
/// else).
pub fn open(want_gpu: bool) -> Result<(Mlx, Device)> {
    catch_errors();
    // SAFETY: an out-parameter.
    check_version(&text(|s| unsafe { sys::mlx_version(s) })?)?;
    let (mut metal, mut cuda) = (false, false);
    // SAFETY: as above.
    check(unsafe { sys::mlx_metal_is_available(&mut metal) })?;
    // SAFETY: as above.
    check(unsafe { sys::mlx_cuda_is_available(&mut cuda) })?;
    let device = match (want_gpu, metal, cuda) {
        (false, ..) => Device::Cpu,
        (true, true, _) => Device::Metal,
        (true, _, true) => Device::Cuda,
        (true, false, false) => return Err(MlxError("no GPU that this build of MLX can use".to_owned())),
    };
    // Fusing runs a compiler at run time, for seconds per kernel on CUDA; what is worth it there is
    // a kernel of ours. SAFETY: no preconditions.
    check(unsafe { sys::mlx_set_compile_mode(sys::mlx_compile_mode__MLX_COMPILE_MODE_NO_FUSE) })?;
    // SAFETY: a device is freed once; a stream is made for it.
    let stream = unsafe {
        let kind = if device == Device::Cpu { sys::mlx_device_type__MLX_CPU } else { sys::mlx_device_type__MLX_GPU };
        let raw = sys::mlx_device_new_type(kind, 0);
        check(sys::mlx_set_default_device(raw))?;
        let mut stream = sys::mlx_stream_new();
        let status = sys::mlx_get_default_stream(&mut stream, raw);
        sys::mlx_device_free(raw);
        check(status)?;
        stream
    };
    Ok((Mlx { stream }, device))
}

/// Bytes the device can give, if MLX knows.
pub fn memory(device: Device) -> Option<u64> {
    let kind = if device == Device::Cpu { return None } else { sys::mlx_device_type__MLX_GPU };
    // SAFETY: handles are made and freed here; out-parameters each.
    unsafe {
        let raw = sys::mlx_device_new_type(kind, 0);
        let mut info = sys::mlx_device_info_new();
        let mut found = None;
        if sys::mlx_device_info_get(&mut info, raw) == 0 {
            for key in [c"max_recommended_working_set_size", c"free_memory", c"total_memory", c"memory_size"] {
                let (mut has, mut size) = (false, 0);
                let known = sys::mlx_device_info_has_key(&mut has, info, key.as_ptr()) == 0 && has;
                if known && sys::mlx_device_info_get_size(&mut size, info, key.as_ptr()) == 0 && size > 0 {
                    found = Some(size as u64);
                    break;
                }
            }
        }
        sys::mlx_device_info_free(info);
        sys::mlx_device_free(raw);
        found
    }
}

/// Refuses a plan whose weights and `slots` whole contexts do not fit into `available` bytes.
pub fn check_memory(plan: &Plan, slots: u32, available: u64) -> Result<()> {
    let states = |kind| plan.states.iter().filter(|s| s.kind == kind).map(|s| s.bytes).fold(0, u64::saturating_add);
    // Recurrent state is held twice, to be able to step back.
    let state = states(StateKind::KvCache).saturating_add(states(StateKind::Recurrent).saturating_mul(2));
    let state = state.saturating_mul(u64::from(slots));
    let parts = [plan.weight_bytes, state, plan.arena_bytes, plan.io.bytes];
    let needed = parts.into_iter().fold(0, u64::saturating_add);
    if needed <= available {
        return Ok(());
    }
    let (weights, context) = (plan.weight_bytes, plan.context);
    Err(MlxError(format!(
        "memory: expected at most {available} bytes, found {needed} needed: weights {weights}, a context of {context} tokens {state}; \
         bake with a smaller --context"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_refused() {
        assert_eq!(check_version("0.32.2"), Ok(()));
        assert_eq!(check_version("0.32.2.dev20260822"), Ok(()));
        for other in ["0.32.20", "0.31.0", ""] {
            let error = check_version(other).expect_err(other).to_string();
            assert_eq!(error, format!("MLX: expected version 0.32.2, found {other}"));
        }
    }
}
