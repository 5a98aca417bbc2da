//! What a reader of an answer should know before using it, said on standard error.

use loaf_formats::chat::{Answers, Chat};
use loaf_runtime::generate::Report;

use crate::{Io, shell};

/// Says that the model was unsure, or that the command it gave destroys something.
pub(crate) fn advise(text: &str, report: &Report, chat: &Chat, io: &mut Io<'_>) {
    let threshold = chat.unsure_below.map(f64::from);
    if let (Some(mean), Some(threshold)) = (report.mean_log_prob(), threshold)
        && mean < threshold
    {
        let unsure = io.stderr_style().yellow("unsure: ");
        let why = "this request is unlike what the model knows; read the answer with care";
        // That it cannot be written is no reason to stop.
        let _ = writeln!(io.stderr, "loaf: {unsure}{why}");
    }
    if chat.answers == Answers::ShellCommand
        && let Some(why) = shell::danger(text)
    {
        io.warn(format_args!("{why}; nothing was run"));
    }
}
