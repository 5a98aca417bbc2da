//! Reading costs, by type: filters that read a string or a list for free do not compile.
//!
//! The modules that hold strings and lists are compiled together with a filter, as a crate of its
//! own. A filter that pays compiles; each of those that do not is refused, and for the reason that
//! what it reaches for is private or not there.

use std::fs;
use std::path::Path;
use std::process::Command;

/// What the compiler says of a filter with this body: nothing, or its errors.
fn compile(name: &str, body: &str) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).expect("a writable folder");
    let src = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    let source = format!(
        "#![allow(dead_code, unused_imports)]
        #[path = \"{src}/error.rs\"] mod error;
        #[path = \"{src}/python.rs\"] mod python;
        #[path = \"{src}/paid/mod.rs\"] mod paid;
        mod filters {{
            use crate::error::Result;
            use crate::paid::{{Budget, Buf, Items, Literal, Text}};
            fn filter(text: &Text, items: &Items<Text>, literal: &Literal) -> Result<usize> {{ {body} }}
        }}"
    );
    let file = folder.join("lib.rs");
    fs::write(&file, source).expect("a writable folder");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let arguments = ["--edition", "2024", "--crate-type", "lib", "--crate-name", "filter", "--emit", "metadata"];
    let output = Command::new(rustc).args(arguments).arg("--out-dir").arg(&folder).arg(&file).output().expect("rustc");
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn filters_that_read_for_free_do_not_compile() {
    // The same reads, paid for: the harness is not what refuses.
    let paid = [
        "Ok(text.chars()?.filter(|c| c.c.is_uppercase()).count())",
        "Ok(usize::from(text.same(text)?))",
        "text.word()?.parse().map_err(|_| text.budget().error(1))",
        "let mut n = 0; for item in items.iter() { n += item?.count()?; } Ok(n)",
        "items.get(0)?.map_or(Ok(0), |item| item.count())",
        "literal.text(text.budget())?.count()",
        "Ok(text.len() + items.len())",
    ];
    for (i, body) in paid.into_iter().enumerate() {
        assert_eq!(compile(&format!("paid{i}"), body), Ok(()), "{body}");
    }
    // Error codes: a private field, no such method, a type that does not fit, no such operator, not
    // indexable, no iterator.
    let free = [
        ("Ok(text.buf.len())", "E0616"),
        ("Ok(text.chars().count())", "E0599"),
        ("Ok(text.as_str().len())", "E0599"),
        ("Ok(str::len(text))", "E0308"),
        ("Ok(str::len(&**text))", "E0614"),
        ("Ok(text.to_string().len())", "E0599"),
        ("Ok(text.bytes().count())", "E0599"),
        ("Ok(usize::from(text == text))", "E0369"),
        ("Ok(usize::from(text < text))", "E0369"),
        ("let Text { buf, .. } = text; Ok(0)", "E0451"),
        ("let mut set = std::collections::HashSet::new(); set.insert(text); Ok(set.len())", "E0277"),
        ("println!(\"{text:?}\"); Ok(0)", "E0277"),
        ("Ok(items.items.len())", "E0616"),
        ("Ok(items[0].len())", "E0608"),
        ("Ok(items.as_slice().len())", "E0599"),
        ("Ok(items.iter().filter(|item| item.is_empty()).count())", "E0599"),
        ("let mut n = 0; for item in items { n += item.len(); } Ok(n)", "E0277"),
        ("Ok(literal.0.len())", "E0616"),
        ("Buf::new(text.budget())?.text.push('x'); Ok(0)", "E0616"),
        ("Budget::new(Default::default()).steps.set(0); Ok(0)", "E0616"),
        ("text.budget().pay(0)?; Ok(0)", "E0624"),
        // What gives a part of a string gives it borrowed, or as a string that is paid for again.
        ("let chars: &'static str = text.word()?; Ok(chars.len())", "lifetime"),
        ("let chars = text.chars()?; let again = chars.clone(); Ok(chars.chain(again).count())", "E0599"),
    ];
    for (i, (body, code)) in free.into_iter().enumerate() {
        let errors = compile(&format!("free{i}"), body).expect_err(body);
        assert!(errors.contains(code), "{body} is refused for another reason:\n{errors}");
    }
}
