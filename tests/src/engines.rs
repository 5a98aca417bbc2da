//! Every engine this machine and build have, for tests that run the same case on all of them.

#[cfg(feature = "mlx")]
use loaf_runtime::backend::mlx::{MlxDevice, MlxOptions, Type, device};
use loaf_runtime::kernels::{Isa, Kernels};
use loaf_runtime::{Model, Session};

/// Something a session can run on.
// A handful of them exist per test.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy)]
pub enum Engine {
    /// A table of CPU kernels: the same bits, whichever it is.
    Cpu(Kernels),
    /// MLX with f32 activations, on its GPU if it has one.
    #[cfg(feature = "mlx")]
    Mlx,
    /// MLX's CPU device with chains as on a GPU, every kernel by its definition.
    #[cfg(feature = "mlx")]
    MlxReference,
}

impl Engine {
    /// All there are, the scalar kernels first.
    pub fn all() -> Vec<Engine> {
        let mut tables: Vec<_> = Kernels::all().filter(|kernels| kernels.isa() != Isa::Naive).collect();
        tables.reverse();
        let engines = tables.into_iter().map(Engine::Cpu);
        #[cfg(feature = "mlx")]
        let engines = engines.chain([Engine::Mlx]).chain((!has_gpu()).then_some(Engine::MlxReference));
        engines.collect()
    }

    /// Name in failures.
    pub fn name(&self) -> &'static str {
        match self {
            Engine::Cpu(kernels) => kernels.isa().name(),
            #[cfg(feature = "mlx")]
            Engine::Mlx => "mlx",
            #[cfg(feature = "mlx")]
            Engine::MlxReference => "mlx with chains",
        }
    }

    /// Whether results are the contract's bits.
    pub fn is_exact(&self) -> bool {
        matches!(self, Engine::Cpu(_))
    }

    /// An empty session.
    pub fn session(&self, model: &Model) -> Session {
        match self {
            Engine::Cpu(kernels) => crate::session(model, *kernels, 2),
            #[cfg(feature = "mlx")]
            Engine::Mlx => on(model, mlx(model)),
            #[cfg(feature = "mlx")]
            Engine::MlxReference => on(model, mlx_as(model, Type::F32, true)),
        }
    }
}

#[cfg(feature = "mlx")]
fn on(model: &Model, device: MlxDevice) -> Session {
    Session::new(loaf_runtime::Engine::on(model, Box::new(device))).expect("a slot")
}

/// Whether MLX has a GPU here.
pub fn has_gpu() -> bool {
    #[cfg(feature = "mlx")]
    return device::open(true).is_ok();
    #[cfg(not(feature = "mlx"))]
    false
}

/// MLX with f32 activations, on the GPU if there is one.
#[cfg(feature = "mlx")]
pub fn mlx(model: &Model) -> MlxDevice {
    mlx_as(model, Type::F32, false)
}

/// MLX with other activations, or on its CPU device with chains as on a GPU.
#[cfg(feature = "mlx")]
pub fn mlx_as(model: &Model, kind: Type, reference: bool) -> MlxDevice {
    let gpu = !reference && has_gpu();
    let options = MlxOptions { gpu, activations: Some(kind), reference, ..MlxOptions::default() };
    MlxDevice::open(model, options).unwrap_or_else(|e| panic!("{e}"))
}
