//! A GPU without a card: a driver that keeps its memory on the host and computes kernels by
//! interpreting their PTX, the very text that is committed. Every access must lie within what was
//! allocated, or it is a panic that names kernel and instruction.
#![cfg(target_os = "linux")]

mod parse;
mod run;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use loaf_runtime::backend::cuda::PTX;
use loaf_runtime::backend::cuda::driver::{Address, Card, Driver, DriverError, Function, Graph, Pinned, Result, Shape};

pub use parse::Module;

/// The PTX of what is Hopper's alone.
pub const HOPPER_PTX: &str = include_str!("../../../runtime/src/backend/cuda/kernels/loaf.compute_90a.ptx");

/// One thing that the driver was asked to do in order.
#[derive(Clone, Debug)]
pub enum Work {
    /// A copy from pinned memory.
    In(Address, Pinned, usize, usize),
    /// A copy to pinned memory.
    Out(Pinned, usize, Address, usize),
    /// A copy within the device.
    Copy(Address, Address, usize),
    /// Bytes that are set.
    Fill(Address, u8, usize),
    /// A kernel, by index, with its parameter.
    Launch(usize, Shape, Vec<u8>),
    /// A graph.
    Replay(usize),
}

/// What a test may ask of the driver afterwards, and tell it before.
#[derive(Debug, Default)]
pub struct Record {
    /// Calls, by name.
    pub calls: HashMap<&'static str, u64>,
    /// Launches and copies in order, whether captured or not.
    pub work: Vec<Work>,
    /// Names of kernels by index.
    pub names: Vec<String>,
    /// The call that fails, and how many of it succeed before.
    pub fails: Option<(&'static str, u64)>,
    /// Whether blocks run in the opposite order.
    pub backwards: bool,
    /// Bytes of memory that the card says are free.
    pub free: Option<u64>,
}

/// The driver.
pub struct Emulated {
    card: Card,
    record: Arc<Mutex<Record>>,
    memory: Vec<&'static mut [u8]>,
    /// Memory of the host that kernels may use, too.
    pinned: Vec<(u64, u64)>,
    modules: Vec<Arc<Module>>,
    /// What only Hopper has, where the card is one: it is interpreted beside the PTX for any card
    /// in place of the cubin.
    hopper: Option<String>,
    capturing: Option<Vec<Work>>,
    graphs: Vec<Vec<Work>>,
}

impl Emulated {
    /// A card of a few multiprocessors, and what it writes down.
    pub fn new() -> (Emulated, Arc<Mutex<Record>>) {
        let record = Arc::new(Mutex::new(Record::default()));
        let card = Card {
            name: "interpreter of PTX".to_owned(),
            capability: (8, 0),
            driver: 12040,
            multiprocessors: 4,
            shared: 227 << 10,
        };
        let made = Emulated {
            card,
            record: record.clone(),
            memory: vec![],
            pinned: vec![],
            modules: vec![],
            hopper: None,
            capturing: None,
            graphs: vec![],
        };
        (made, record)
    }

    /// A card that has Hopper's own kernels: `ptx` is what they are compiled to.
    pub fn hopper(ptx: &str) -> (Emulated, Arc<Mutex<Record>>) {
        let (mut made, record) = Emulated::new();
        (made.card.capability, made.hopper) = ((9, 0), Some(ptx.to_owned()));
        (made, record)
    }

    fn call(&mut self, call: &'static str) -> Result<()> {
        let mut record = self.record.lock().expect("one thread");
        let count = record.calls.entry(call).or_default();
        *count += 1;
        let count = *count;
        match record.fails {
            Some((name, after)) if name == call && count > after => Err(DriverError {
                call,
                answer: "CUDA_ERROR_UNKNOWN (as the test wants it)".to_owned(),
                memory: call == "allocate",
            }),
            _ => Ok(()),
        }
    }

    fn check(&self, at: Address, bytes: usize, what: &str) {
        let found = self.memory.iter().any(|m| {
            let start = m.as_ptr() as u64;
            at >= start && at + bytes as u64 <= start + m.len() as u64
        });
        assert!(found, "{what}: {bytes} bytes at {at:#x} were not allocated");
    }

    fn submit(&mut self, work: Work) {
        self.record.lock().expect("one thread").work.push(work.clone());
        match &mut self.capturing {
            Some(captured) => captured.push(work),
            None => self.carry_out(&work),
        }
    }

    fn carry_out(&mut self, work: &Work) {
        match work {
            Work::In(to, from, at, n) => {
                assert!(at + n <= from.bytes);
                self.check(*to, *n, "copy in");
                // SAFETY: both ranges were just checked.
                unsafe { std::ptr::copy_nonoverlapping(from.at.add(*at), *to as *mut u8, *n) }
            }
            Work::Out(to, at, from, n) => {
                assert!(at + n <= to.bytes);
                self.check(*from, *n, "copy out");
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(*from as *const u8, to.at.add(*at), *n) }
            }
            Work::Copy(to, from, n) => {
                self.check(*from, *n, "copy from");
                self.check(*to, *n, "copy to");
                // SAFETY: as above.
                unsafe { std::ptr::copy(*from as *const u8, *to as *mut u8, *n) }
            }
            Work::Fill(to, byte, n) => {
                self.check(*to, *n, "fill");
                // SAFETY: as above.
                unsafe { std::ptr::write_bytes(*to as *mut u8, *byte, *n) }
            }
            Work::Launch(function, shape, parameter) => {
                let mut function = *function;
                let mut modules = self.modules.iter();
                let module = modules.find(|m| {
                    let here = function < m.kernels.len();
                    function -= if here { 0 } else { m.kernels.len() };
                    here
                });
                let module = module.expect("loaded").clone();
                let backwards = self.record.lock().expect("one thread").backwards;
                let mut memory = self.pinned.clone();
                memory.extend(self.memory.iter().map(|m| (m.as_ptr() as u64, m.as_ptr() as u64 + m.len() as u64)));
                run::launch(&module, function, *shape, parameter, &memory, backwards);
            }
            Work::Replay(graph) => {
                let graph = self.graphs[*graph].clone();
                graph.iter().for_each(|work| self.carry_out(work));
            }
        }
    }
}

/// The same PTX is read once.
fn parsed(image: &[u8]) -> Arc<Module> {
    static ONCE: OnceLock<Mutex<HashMap<Vec<u8>, Arc<Module>>>> = OnceLock::new();
    let all = ONCE.get_or_init(Mutex::default);
    let mut all = all.lock().expect("whoever held it did not panic");
    let text = || std::str::from_utf8(image).expect("PTX is text").trim_end_matches('\0');
    all.entry(image.to_vec()).or_insert_with(|| Arc::new(Module::parse(text()))).clone()
}

impl Driver for Emulated {
    fn card(&self) -> &Card {
        &self.card
    }

    fn enter(&mut self) -> Result<()> {
        Ok(())
    }

    fn memory(&mut self) -> Result<(u64, u64)> {
        let free = self.record.lock().expect("one thread").free.unwrap_or(8 << 30);
        Ok((free, 8 << 30))
    }

    fn allocate(&mut self, bytes: u64) -> Result<Address> {
        self.call("allocate")?;
        let layout = std::alloc::Layout::from_size_align((bytes as usize).max(256), 256).expect("a size");
        // SAFETY: not empty. What is allocated is never zero by itself: whoever reads before
        // writing gets patterns.
        let memory = unsafe {
            let at = std::alloc::alloc(layout);
            assert!(!at.is_null());
            std::ptr::write_bytes(at, 0xa5, layout.size());
            std::slice::from_raw_parts_mut(at, layout.size())
        };
        let at = memory.as_ptr() as u64;
        self.memory.push(memory);
        Ok(at)
    }

    fn pinned(&mut self, bytes: usize) -> Result<Pinned> {
        self.call("pinned")?;
        let memory: &'static mut [u8] = vec![0x5a; bytes.max(64) + 64].leak();
        let skip = memory.as_ptr().align_offset(64);
        let at = memory[skip..].as_ptr() as u64;
        self.pinned.push((at, at + bytes.max(64) as u64));
        Ok(Pinned { at: memory[skip..].as_mut_ptr(), bytes })
    }

    fn load(&mut self, image: &[u8], names: &[&str]) -> Result<Vec<Function>> {
        self.call("load")?;
        self.modules = match &self.hopper {
            Some(own) => vec![parsed(PTX.as_bytes()), parsed(own.as_bytes())],
            None => vec![parsed(image)],
        };
        // What is Hopper's alone does nothing in the PTX for any card.
        let all: Vec<String> = self.modules.iter().flat_map(|m| m.names()).collect();
        let find = |n: &&str| all.iter().rposition(|k| k == n).unwrap_or_else(|| panic!("PTX: no kernel {n}"));
        let functions = names.iter().map(|n| Function(find(n) as u64)).collect();
        self.record.lock().expect("one thread").names = all;
        Ok(functions)
    }

    fn allow_shared(&mut self, _: Function, _: u32) -> Result<()> {
        self.call("allow_shared")
    }

    fn prefer_shared(&mut self, _: Function) -> Result<()> {
        self.call("prefer_shared")
    }

    fn copy_in(&mut self, to: Address, from: Pinned, at: usize, bytes: usize) -> Result<()> {
        self.call("copy_in")?;
        self.submit(Work::In(to, from, at, bytes));
        Ok(())
    }

    fn copy_out(&mut self, to: Pinned, at: usize, from: Address, bytes: usize) -> Result<()> {
        self.call("copy_out")?;
        self.submit(Work::Out(to, at, from, bytes));
        Ok(())
    }

    fn copy(&mut self, to: Address, from: Address, bytes: usize) -> Result<()> {
        self.call("copy")?;
        self.submit(Work::Copy(to, from, bytes));
        Ok(())
    }

    fn fill(&mut self, to: Address, byte: u8, bytes: usize) -> Result<()> {
        self.call("fill")?;
        self.submit(Work::Fill(to, byte, bytes));
        Ok(())
    }

    fn launch(&mut self, function: Function, shape: Shape, parameter: &[u8]) -> Result<()> {
        self.call("launch")?;
        assert!(shape.grid[0] > 0 && shape.grid[1] - 1 < 65535 && shape.grid[2] - 1 < 65535, "{shape:?}");
        assert!(shape.block > 0 && shape.block <= 1024 && shape.shared <= self.card.shared, "{shape:?}");
        self.submit(Work::Launch(function.0 as usize, shape, parameter.to_vec()));
        Ok(())
    }

    fn begin_capture(&mut self) -> Result<()> {
        self.call("begin_capture")?;
        assert!(self.capturing.is_none());
        self.capturing = Some(vec![]);
        Ok(())
    }

    fn end_capture(&mut self) -> Result<Graph> {
        self.call("end_capture")?;
        self.graphs.push(self.capturing.take().expect("a capture"));
        Ok(Graph(self.graphs.len() as u64 - 1))
    }

    fn replay(&mut self, graph: Graph) -> Result<()> {
        self.call("replay")?;
        self.submit(Work::Replay(graph.0 as usize));
        Ok(())
    }

    fn wait(&mut self) -> Result<()> {
        assert!(self.capturing.is_none(), "a wait within a capture");
        self.call("wait")
    }

    fn mark(&mut self, _: usize) -> Result<()> {
        assert!(self.capturing.is_none(), "a mark within a capture");
        self.call("mark")
    }

    fn wait_for(&mut self, _: usize) -> Result<()> {
        self.call("wait_for")
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        for memory in self.memory.drain(..) {
            let layout = std::alloc::Layout::from_size_align(memory.len(), 256).expect("as it was allocated");
            // SAFETY: allocated with this layout.
            unsafe { std::alloc::dealloc(memory.as_mut_ptr(), layout) }
        }
    }
}
