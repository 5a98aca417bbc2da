//! NVIDIA's driver, opened at run time: a table of the functions that the backend calls, and
//! [`Driver`] over it.
//!
//! Nothing of CUDA is linked or needed when the program is built; without the library, or with one
//! that lacks a function, opening says so in a line.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use super::driver::{Address, Card, Driver, DriverError, Function, Graph, MARKS, Pinned, Result, Shape};

/// The oldest driver that the kernels' PTX (8.4) and programmatic launches in graphs work with.
const OLDEST: u32 = 12040;

const LIBRARY: &CStr = c"libcuda.so.1";

#[repr(C)]
struct LaunchAttribute {
    id: u32,
    pad: u32,
    value: [u64; 8],
}

#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: *mut c_void,
    attrs: *const LaunchAttribute,
    count: c_uint,
}

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const OVERLAP: u32 = 6;

macro_rules! table {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*);)*) => {
        /// The driver's functions.
        struct Table { $($field: unsafe extern "C" fn($($arg),*) -> c_int,)* }

        impl Table {
            /// Looks every function up in an opened library.
            fn of(library: *mut c_void) -> std::result::Result<Table, &'static str> {
                $(
                    const _: () = assert!($symbol.len() > 0);
                    let name = concat!($symbol, "\0");
                    // SAFETY: a library that was opened and a string that ends in a zero.
                    let at = unsafe { libc::dlsym(library, name.as_ptr().cast()) };
                    if at.is_null() {
                        return Err($symbol);
                    }
                    // SAFETY: the function of that name has this type, by cuda.h.
                    let $field = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> c_int>(at) };
                )*
                Ok(Table { $($field),* })
            }
        }
    };
}

type Out<T> = *mut T;
type Handle = *mut c_void;

table! {
    init = "cuInit": fn(c_uint);
    version = "cuDriverGetVersion": fn(Out<c_int>);
    count = "cuDeviceGetCount": fn(Out<c_int>);
    device = "cuDeviceGet": fn(Out<c_int>, c_int);
    name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    attribute = "cuDeviceGetAttribute": fn(Out<c_int>, c_int, c_int);
    error_name = "cuGetErrorName": fn(c_int, Out<*const c_char>);
    error_text = "cuGetErrorString": fn(c_int, Out<*const c_char>);
    retain = "cuDevicePrimaryCtxRetain": fn(Out<Handle>, c_int);
    release = "cuDevicePrimaryCtxRelease_v2": fn(c_int);
    set_current = "cuCtxSetCurrent": fn(Handle);
    mem_info = "cuMemGetInfo_v2": fn(Out<usize>, Out<usize>);
    mem_alloc = "cuMemAlloc_v2": fn(Out<Address>, usize);
    mem_free = "cuMemFree_v2": fn(Address);
    host_alloc = "cuMemHostAlloc": fn(Out<Handle>, usize, c_uint);
    host_free = "cuMemFreeHost": fn(Handle);
    copy_in = "cuMemcpyHtoDAsync_v2": fn(Address, *const c_void, usize, Handle);
    copy_out = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, Address, usize, Handle);
    copy = "cuMemcpyDtoDAsync_v2": fn(Address, Address, usize, Handle);
    fill = "cuMemsetD8Async": fn(Address, u8, usize, Handle);
    module_load = "cuModuleLoadData": fn(Out<Handle>, *const c_void);
    module_unload = "cuModuleUnload": fn(Handle);
    module_function = "cuModuleGetFunction": fn(Out<Handle>, Handle, *const c_char);
    function_set = "cuFuncSetAttribute": fn(Handle, c_int, c_int);
    launch = "cuLaunchKernelEx": fn(*const LaunchConfig, Handle, *const *mut c_void, *const *mut c_void);
    stream_create = "cuStreamCreate": fn(Out<Handle>, c_uint);
    stream_destroy = "cuStreamDestroy_v2": fn(Handle);
    stream_wait = "cuStreamSynchronize": fn(Handle);
    capture_begin = "cuStreamBeginCapture_v2": fn(Handle, c_int);
    capture_end = "cuStreamEndCapture": fn(Handle, Out<Handle>);
    graph_instantiate = "cuGraphInstantiateWithFlags": fn(Out<Handle>, Handle, u64);
    graph_destroy = "cuGraphDestroy": fn(Handle);
    graph_exec_destroy = "cuGraphExecDestroy": fn(Handle);
    graph_launch = "cuGraphLaunch": fn(Handle, Handle);
    event_create = "cuEventCreate": fn(Out<Handle>, c_uint);
    event_destroy = "cuEventDestroy_v2": fn(Handle);
    event_record = "cuEventRecord": fn(Handle, Handle);
    event_wait = "cuEventSynchronize": fn(Handle);
}

impl Table {
    fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let text = |f: unsafe extern "C" fn(c_int, Out<*const c_char>) -> c_int| {
            let mut at = null();
            // SAFETY: an out-parameter; the strings the driver gives are its own and constant.
            unsafe {
                if f(status, &mut at) == 0 && !at.is_null() {
                    CStr::from_ptr(at).to_string_lossy().into_owned()
                } else {
                    String::new()
                }
            }
        };
        let (name, says) = (text(self.error_name), text(self.error_text));
        let answer = if name.is_empty() { format!("error {status}") } else { format!("{name} ({says})") };
        Err(DriverError { call, answer, memory: status == 2 })
    }
}

/// Why a device could not be opened, for people.
fn none(answer: impl Into<String>) -> DriverError {
    DriverError { call: "opening a device", answer: answer.into(), memory: false }
}

/// One of NVIDIA's devices.
pub struct Nvidia {
    table: Table,
    card: Card,
    device: c_int,
    context: Handle,
    stream: Handle,
    events: [Handle; MARKS],
    marked: [bool; MARKS],
    modules: Vec<Handle>,
    memory: Vec<Address>,
    pinned: Vec<Handle>,
    graphs: Vec<Handle>,
}

// SAFETY: the driver's handles may be used from any thread that entered the context; `self` is used
// by one at a time.
unsafe impl Send for Nvidia {}

impl Nvidia {
    /// Opens device `index` of those that the driver shows.
    ///
    /// # Errors
    /// No driver, an old one, no such device, or what the driver says.
    pub fn open(index: u32) -> Result<Nvidia> {
        // SAFETY: a constant string; the library stays open for the life of the process.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(none("no NVIDIA driver here (libcuda.so.1 cannot be opened)"));
        }
        let table =
            Table::of(library).map_err(|f| none(format!("the driver has no {f}: it is older than CUDA 12.4")))?;
        let t = &table;
        // SAFETY: each call gets what cuda.h says it takes, out-parameters being locals.
        unsafe {
            t.check("cuInit", (t.init)(0))?;
            let (mut driver, mut count, mut device) = (0, 0, 0);
            t.check("cuDriverGetVersion", (t.version)(&mut driver))?;
            if (driver as u32) < OLDEST {
                let text =
                    format!("the driver is for CUDA {}.{}; expected 12.4 or later", driver / 1000, driver % 1000 / 10);
                return Err(none(text));
            }
            t.check("cuDeviceGetCount", (t.count)(&mut count))?;
            if index >= count as u32 {
                return Err(none(format!("expected a device below {count}, found {index}")));
            }
            t.check("cuDeviceGet", (t.device)(&mut device, index as c_int))?;
            let mut name = [0 as c_char; 128];
            t.check("cuDeviceGetName", (t.name)(name.as_mut_ptr(), 127, device))?;
            let name = CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned();
            let attribute = |which: c_int| {
                let mut value = 0;
                t.check("cuDeviceGetAttribute", (t.attribute)(&mut value, which, device)).map(|()| value as u32)
            };
            // Major, minor, multiprocessors, shared memory of a block that asks for it.
            let card = Card {
                name,
                capability: (attribute(75)?, attribute(76)?),
                driver: driver as u32,
                multiprocessors: attribute(16)?,
                shared: attribute(97)?,
            };
            let mut context = null_mut();
            t.check("cuDevicePrimaryCtxRetain", (t.retain)(&mut context, device))?;
            let mut made = Nvidia {
                card,
                device,
                context,
                stream: null_mut(),
                events: [null_mut(); MARKS],
                marked: [false; MARKS],
                modules: vec![],
                memory: vec![],
                pinned: vec![],
                graphs: vec![],
                table,
            };
            made.enter()?;
            let t = &made.table;
            // Not ordered with the default stream; events without times.
            t.check("cuStreamCreate", (t.stream_create)(&mut made.stream, 1))?;
            for event in &mut made.events {
                t.check("cuEventCreate", (t.event_create)(event, 2))?;
            }
            Ok(made)
        }
    }
}

impl Drop for Nvidia {
    fn drop(&mut self) {
        let t = &self.table;
        // SAFETY: handles of this context, each given back once; that a broken device answers with
        // an error changes nothing.
        unsafe {
            (t.set_current)(self.context);
            if !self.stream.is_null() {
                (t.stream_wait)(self.stream);
            }
            self.graphs.iter().for_each(|&g| _ = (t.graph_exec_destroy)(g));
            self.modules.iter().for_each(|&m| _ = (t.module_unload)(m));
            self.memory.iter().for_each(|&m| _ = (t.mem_free)(m));
            self.pinned.iter().for_each(|&m| _ = (t.host_free)(m));
            self.events.iter().filter(|e| !e.is_null()).for_each(|&e| _ = (t.event_destroy)(e));
            if !self.stream.is_null() {
                (t.stream_destroy)(self.stream);
            }
            (t.release)(self.device);
        }
    }
}

impl Driver for Nvidia {
    fn card(&self) -> &Card {
        &self.card
    }

    fn enter(&mut self) -> Result<()> {
        // SAFETY: the context is retained.
        self.table.check("cuCtxSetCurrent", unsafe { (self.table.set_current)(self.context) })
    }

    fn memory(&mut self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: out-parameters.
        self.table.check("cuMemGetInfo", unsafe { (self.table.mem_info)(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    fn allocate(&mut self, bytes: u64) -> Result<Address> {
        let mut at = 0;
        // SAFETY: an out-parameter.
        self.table.check("cuMemAlloc", unsafe { (self.table.mem_alloc)(&mut at, (bytes as usize).max(256)) })?;
        self.memory.push(at);
        Ok(at)
    }

    fn pinned(&mut self, bytes: usize) -> Result<Pinned> {
        let mut at = null_mut();
        // SAFETY: an out-parameter; the flag says that every context may use it.
        self.table.check("cuMemHostAlloc", unsafe { (self.table.host_alloc)(&mut at, bytes.max(64), 1) })?;
        self.pinned.push(at);
        Ok(Pinned { at: at.cast(), bytes })
    }

    fn load(&mut self, image: &[u8], names: &[&str]) -> Result<Vec<Function>> {
        let t = &self.table;
        let mut module = null_mut();
        // SAFETY: an image as the compiler wrote it; PTX ends in a zero.
        t.check("cuModuleLoadData", unsafe { (t.module_load)(&mut module, image.as_ptr().cast()) })?;
        self.modules.push(module);
        let find = |name: &&str| {
            let mut at = null_mut();
            let name = CString::new(*name).unwrap_or_default();
            // SAFETY: a loaded module and a string that ends in a zero.
            t.check("cuModuleGetFunction", unsafe { (t.module_function)(&mut at, module, name.as_ptr()) })?;
            Ok(Function(at as u64))
        };
        names.iter().map(find).collect()
    }

    fn allow_shared(&mut self, function: Function, bytes: u32) -> Result<()> {
        let status = {
            // SAFETY: a function of a loaded module; 8 is the largest dynamic shared memory.
            unsafe { (self.table.function_set)(function.0 as Handle, 8, bytes as c_int) }
        };
        self.table.check("cuFuncSetAttribute", status)
    }

    fn prefer_shared(&mut self, function: Function) -> Result<()> {
        // SAFETY: a function of a loaded module; 9 is the part of a multiprocessor's memory that is
        // shared, in hundredths.
        let status = unsafe { (self.table.function_set)(function.0 as Handle, 9, 100) };
        self.table.check("cuFuncSetAttribute", status)
    }

    fn copy_in(&mut self, to: Address, from: Pinned, at: usize, bytes: usize) -> Result<()> {
        debug_assert!(at + bytes <= from.bytes);
        let status = {
            // SAFETY: both ranges were allocated, by the trait's contract.
            unsafe { (self.table.copy_in)(to, from.at.add(at).cast(), bytes, self.stream) }
        };
        self.table.check("cuMemcpyHtoDAsync", status)
    }

    fn copy_out(&mut self, to: Pinned, at: usize, from: Address, bytes: usize) -> Result<()> {
        debug_assert!(at + bytes <= to.bytes);
        let status = {
            // SAFETY: as in `copy_in`.
            unsafe { (self.table.copy_out)(to.at.add(at).cast(), from, bytes, self.stream) }
        };
        self.table.check("cuMemcpyDtoHAsync", status)
    }

    fn copy(&mut self, to: Address, from: Address, bytes: usize) -> Result<()> {
        // SAFETY: as in `copy_in`.
        let status = unsafe { (self.table.copy)(to, from, bytes, self.stream) };
        self.table.check("cuMemcpyDtoDAsync", status)
    }

    fn fill(&mut self, to: Address, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: as in `copy_in`.
        let status = unsafe { (self.table.fill)(to, byte, bytes, self.stream) };
        self.table.check("cuMemsetD8Async", status)
    }

    fn launch(&mut self, function: Function, shape: Shape, parameter: &[u8]) -> Result<()> {
        let attribute = LaunchAttribute { id: OVERLAP, pad: 0, value: [1, 0, 0, 0, 0, 0, 0, 0] };
        let config = LaunchConfig {
            grid: shape.grid,
            block: [shape.block, 1, 1],
            shared: shape.shared,
            stream: self.stream,
            attrs: &attribute,
            count: u32::from(shape.overlap),
        };
        let parameters = [parameter.as_ptr().cast_mut().cast::<c_void>()];
        let status = {
            // SAFETY: the kernel takes one parameter, which is copied at once.
            unsafe { (self.table.launch)(&config, function.0 as Handle, parameters.as_ptr(), null()) }
        };
        self.table.check("cuLaunchKernelEx", status)
    }

    fn begin_capture(&mut self) -> Result<()> {
        // SAFETY: our stream; what other threads do meanwhile is not looked at.
        let status = unsafe { (self.table.capture_begin)(self.stream, 2) };
        self.table.check("cuStreamBeginCapture", status)
    }

    fn end_capture(&mut self) -> Result<Graph> {
        let (mut graph, mut exec) = (null_mut(), null_mut());
        let t = &self.table;
        // SAFETY: a capture is under way; the graph is given back once it is instantiated.
        unsafe {
            t.check("cuStreamEndCapture", (t.capture_end)(self.stream, &mut graph))?;
            let made = t.check("cuGraphInstantiate", (t.graph_instantiate)(&mut exec, graph, 0));
            (t.graph_destroy)(graph);
            made?;
        }
        self.graphs.push(exec);
        Ok(Graph(exec as u64))
    }

    fn replay(&mut self, graph: Graph) -> Result<()> {
        // SAFETY: a graph that `end_capture` made.
        let status = unsafe { (self.table.graph_launch)(graph.0 as Handle, self.stream) };
        self.table.check("cuGraphLaunch", status)
    }

    fn wait(&mut self) -> Result<()> {
        // SAFETY: our stream.
        let status = unsafe { (self.table.stream_wait)(self.stream) };
        self.table.check("cuStreamSynchronize", status)
    }

    fn mark(&mut self, mark: usize) -> Result<()> {
        self.marked[mark] = true;
        // SAFETY: an event and a stream of ours.
        let status = unsafe { (self.table.event_record)(self.events[mark], self.stream) };
        self.table.check("cuEventRecord", status)
    }

    fn wait_for(&mut self, mark: usize) -> Result<()> {
        if !self.marked[mark] {
            return Ok(());
        }
        // SAFETY: an event that was recorded.
        let status = unsafe { (self.table.event_wait)(self.events[mark]) };
        self.table.check("cuEventSynchronize", status)
    }
}
