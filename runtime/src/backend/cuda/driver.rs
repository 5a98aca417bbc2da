//! What the backend asks of a GPU's driver, in a dozen calls.
//!
//! [`Driver`] is the whole of it: memory, copies, kernels, graphs, waiting, all in order on one
//! stream. [`super::nvidia`] is NVIDIA's, opened at run time; tests have one that records what is
//! launched and computes it by interpreting the compiled kernels.

use std::fmt;

/// An address in the device's memory.
pub type Address = u64;

/// A kernel of the loaded module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function(pub u64);

/// Launches and copies that were captured, to be replayed as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub u64);

/// Memory of the host that the device can copy from and to while the host goes on.
#[derive(Clone, Copy, Debug)]
pub struct Pinned {
    /// First byte.
    pub at: *mut u8,
    /// Length.
    pub bytes: usize,
}

// SAFETY: an address and a length; whoever reads or writes behind it answers for that.
unsafe impl Send for Pinned {}

/// Why the driver did not do as it was asked: the call, and its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// The call.
    pub call: &'static str,
    /// The driver's name for what went wrong.
    pub answer: String,
    /// Whether it is that there is no memory.
    pub memory: bool,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA: {}: {}", self.call, self.answer)
    }
}

impl std::error::Error for DriverError {}

/// Results of driver calls.
pub type Result<T> = std::result::Result<T, DriverError>;

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// CUDA version of the driver, such as 13000.
    pub driver: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of shared memory that a block may have.
    pub shared: u32,
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Whether it may begin before the launch before it has ended (it then waits itself).
    pub overlap: bool,
}

/// One device with one stream. Everything but [`Driver::wait`] and allocation returns at once and
/// happens in order.
///
/// # Safety of what it is given
/// Addresses come from [`Driver::allocate`], ranges lie within what was allocated, kernels'
/// parameters name such memory alone: the backend proves that from the verified plan.
pub trait Driver: Send {
    /// What the device is.
    fn card(&self) -> &Card;

    /// Makes the calling thread one that may use the device.
    ///
    /// # Errors
    /// What the driver says.
    fn enter(&mut self) -> Result<()>;

    /// Free and all bytes of memory.
    ///
    /// # Errors
    /// What the driver says.
    fn memory(&mut self) -> Result<(u64, u64)>;

    /// Allocates memory, at least 256-byte aligned; it is given back when the driver is dropped.
    ///
    /// # Errors
    /// What the driver says.
    fn allocate(&mut self, bytes: u64) -> Result<Address>;

    /// Allocates memory of the host; given back when the driver is dropped.
    ///
    /// # Errors
    /// What the driver says.
    fn pinned(&mut self, bytes: usize) -> Result<Pinned>;

    /// Loads compiled kernels and looks these up.
    ///
    /// # Errors
    /// What the driver says.
    fn load(&mut self, image: &[u8], names: &[&str]) -> Result<Vec<Function>>;

    /// Lets a kernel use so much dynamic shared memory.
    ///
    /// # Errors
    /// What the driver says.
    fn allow_shared(&mut self, function: Function, bytes: u32) -> Result<()>;

    /// Says that a kernel is better off with as much shared memory as there is, and less of a
    /// cache: more of it can begin beside others that take some.
    ///
    /// # Errors
    /// What the driver says.
    fn prefer_shared(&mut self, function: Function) -> Result<()>;

    /// Copies from pinned memory.
    ///
    /// # Errors
    /// What the driver says.
    fn copy_in(&mut self, to: Address, from: Pinned, at: usize, bytes: usize) -> Result<()>;

    /// Copies to pinned memory.
    ///
    /// # Errors
    /// What the driver says.
    fn copy_out(&mut self, to: Pinned, at: usize, from: Address, bytes: usize) -> Result<()>;

    /// Copies within the device.
    ///
    /// # Errors
    /// What the driver says.
    fn copy(&mut self, to: Address, from: Address, bytes: usize) -> Result<()>;

    /// Sets bytes.
    ///
    /// # Errors
    /// What the driver says.
    fn fill(&mut self, to: Address, byte: u8, bytes: usize) -> Result<()>;

    /// Launches a kernel whose one parameter is these bytes.
    ///
    /// # Errors
    /// What the driver says.
    fn launch(&mut self, function: Function, shape: Shape, parameter: &[u8]) -> Result<()>;

    /// From here on launches and copies are captured and not carried out.
    ///
    /// # Errors
    /// What the driver says.
    fn begin_capture(&mut self) -> Result<()>;

    /// What was captured.
    ///
    /// # Errors
    /// What the driver says.
    fn end_capture(&mut self) -> Result<Graph>;

    /// Carries out what was captured.
    ///
    /// # Errors
    /// What the driver says.
    fn replay(&mut self, graph: Graph) -> Result<()>;

    /// Waits until everything is done.
    ///
    /// # Errors
    /// What the driver says, of whatever failed since the last wait.
    fn wait(&mut self) -> Result<()>;

    /// Marks this place in the order of things, under one of a few numbers.
    ///
    /// # Errors
    /// What the driver says.
    fn mark(&mut self, mark: usize) -> Result<()>;

    /// Waits until a mark is passed; at once if it was never set.
    ///
    /// # Errors
    /// What the driver says.
    fn wait_for(&mut self, mark: usize) -> Result<()>;
}

/// Marks that there are.
pub const MARKS: usize = 6;
