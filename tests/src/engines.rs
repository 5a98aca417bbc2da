//! Every engine this machine and build have, for tests that run the same case on all of them.

use loaf_runtime::kernels::{Isa, Kernels};
use loaf_runtime::loaf::Loaf;
use loaf_runtime::session::Session;

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
}

impl Engine {
    /// All there are, the scalar kernels first.
    pub fn all() -> Vec<Engine> {
        let mut tables: Vec<_> = Kernels::all().filter(|kernels| kernels.isa() != Isa::Naive).collect();
        tables.reverse();
        let engines = tables.into_iter().map(Engine::Cpu);
        #[cfg(feature = "mlx")]
        let engines = engines.chain([Engine::Mlx]);
        engines.collect()
    }

    /// Name in failures.
    pub fn name(&self) -> &'static str {
        match self {
            Engine::Cpu(kernels) => kernels.isa().name(),
            #[cfg(feature = "mlx")]
            Engine::Mlx => "mlx",
        }
    }

    /// Whether results are the contract's bits.
    pub fn is_exact(&self) -> bool {
        matches!(self, Engine::Cpu(_))
    }

    /// An empty session.
    pub fn session<'a>(&self, loaf: &'a Loaf) -> Session<'a> {
        match self {
            Engine::Cpu(kernels) => crate::session(loaf, *kernels, 2),
            #[cfg(feature = "mlx")]
            Engine::Mlx => Session::over(loaf, Box::new(mlx(loaf))),
        }
    }
}

/// MLX with f32 activations, on the GPU if there is one.
#[cfg(feature = "mlx")]
pub fn mlx(loaf: &Loaf) -> loaf_runtime::backend::mlx::MlxBackend<'_> {
    use loaf_runtime::backend::mlx::{MlxBackend, MlxOptions, array::Type, device};
    let options = MlxOptions { gpu: device::open(true).is_ok(), activations: Some(Type::F32), memory: None };
    MlxBackend::open(loaf, options).unwrap_or_else(|e| panic!("{e}"))
}
