//! The commands of a conversation, which begin with `/`: what `/help` lists and the editor
//! completes.

/// Commands: name, argument, what it does.
pub(crate) const COMMANDS: [(&str, &str, &str); 11] = [
    ("help", "", "this list"),
    ("reset", "", "forget the conversation, keep the system message"),
    ("system", "TEXT", "set the system message and start anew; without TEXT, remove it"),
    ("read", "FILE", "put the text of FILE before the next message"),
    ("save", "FILE", "write the conversation to FILE, as JSON"),
    ("load", "FILE", "continue the conversation in FILE"),
    ("regen", "", "replace the last answer by another one"),
    ("set", "NAME VALUE", "change how tokens are chosen; without NAME, say how they are"),
    ("stats", "", "say how full the context is and how fast the last answer came"),
    ("exit", "", "leave (so does the end of input)"),
    ("quit", "", "leave"),
];
