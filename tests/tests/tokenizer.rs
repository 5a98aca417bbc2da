//! placeholder
use tokenizers as _;
