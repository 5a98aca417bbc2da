//! Messages to prompt text, by the Jinja template that came with the model: the crate
//! `loaf-template`.

pub use loaf_template::{Error as TemplateError, Inputs, Limits, Rendered, Template as ChatTemplate, Time, message};
