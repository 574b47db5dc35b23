//! Sizes of files, functions and crates, and their documentation.

use super::docs::{self, Doc};
use super::source::{Crate, File, is_for_tests};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// Maximum number of lines of a function without an exception.
pub const FUNCTION_LINES_MAX: usize = 70;
/// Number of lines above an unsafe block within which its reason must be given.
const REASON_LINES: usize = 6;

/// One function.
pub struct Function {
    pub name: String,
    pub path: PathBuf,
    pub lines: usize,
    pub doc: Option<Doc>,
    /// First line of its documentation.
    pub text: Option<String>,
}

/// Counts of all files.
#[derive(Default)]
pub struct Measures {
    /// Number of lines before the tests, by file.
    pub file_lines: Vec<(PathBuf, usize)>,
    pub functions: Vec<Function>,
    pub unsafe_blocks: usize,
    pub unsafe_without_reason: Vec<(PathBuf, usize)>,
    pub comment_lines: usize,
    pub lines: usize,
    /// Number of lines before the tests, by crate.
    pub crate_lines: BTreeMap<String, usize>,
    /// Number of public functions, by crate.
    pub public_functions: BTreeMap<String, usize>,
    /// Number of fields that other modules reach, by crate.
    pub open_fields: BTreeMap<String, usize>,
    /// Files with `impl` blocks of a type.
    pub impls: BTreeMap<String, BTreeSet<PathBuf>>,
}

/// Measures all crates.
pub fn measure(crates: &[Crate]) -> Measures {
    let mut measures = Measures::default();
    for owner in crates {
        for file in &owner.files {
            measures.text(owner, file);
            let mut walk = Walk { measures: &mut measures, owner, file };
            file.items.iter().for_each(|item| walk.visit_item(item));
        }
    }
    measures
}

impl Measures {
    fn text(&mut self, owner: &Crate, file: &File) {
        let lines = &file.lines[..file.before_tests];
        let count = lines.len();
        self.file_lines.push((file.path.clone(), count));
        self.lines += count;
        *self.crate_lines.entry(owner.name.clone()).or_default() += count;
        let is_comment = |line: &str| line.starts_with("//") && !line.starts_with("///") && !line.starts_with("//!");
        self.comment_lines += lines.iter().filter(|line| is_comment(line.trim_start())).count();
    }
}

struct Walk<'a> {
    measures: &'a mut Measures,
    owner: &'a Crate,
    file: &'a File,
}

impl Walk<'_> {
    fn function(&mut self, signature: &syn::Signature, end: usize, is_public: bool, attributes: &[syn::Attribute]) {
        let text = docs::first_line(attributes);
        if is_public {
            *self.measures.public_functions.entry(self.owner.name.clone()).or_default() += 1;
        }
        self.measures.functions.push(Function {
            name: signature.ident.to_string(),
            path: self.file.path.clone(),
            lines: end + 1 - signature.span().start().line,
            doc: text.as_deref().and_then(docs::judge),
            text,
        });
    }
}

impl<'ast> Visit<'ast> for Walk<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_for_tests(&item.attrs) {
            self.function(&item.sig, item.block.span().end().line, is_public(&item.vis), &item.attrs);
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            self.function(&item.sig, item.block.span().end().line, is_public(&item.vis), &item.attrs);
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.function(&item.sig, item.span().end().line, false, &item.attrs);
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if is_for_tests(&item.attrs) {
            return;
        }
        if let syn::Type::Path(path) = &*item.self_ty
            && let Some(last) = path.path.segments.last()
        {
            let name = format!("{}::{}", self.owner.name, last.ident);
            self.measures.impls.entry(name).or_default().insert(self.file.path.clone());
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if field.ident.is_some() && !matches!(field.vis, syn::Visibility::Inherited) {
            *self.measures.open_fields.entry(self.owner.name.clone()).or_default() += 1;
        }
        visit::visit_field(self, field);
    }

    fn visit_expr_unsafe(&mut self, block: &'ast syn::ExprUnsafe) {
        let line = block.span().start().line;
        self.measures.unsafe_blocks += 1;
        let above = &self.file.lines[line.saturating_sub(1 + REASON_LINES)..line];
        if !above.iter().any(|line| line.contains("SAFETY:")) {
            self.measures.unsafe_without_reason.push((self.file.path.clone(), line));
        }
        visit::visit_expr_unsafe(self, block);
    }
}

fn is_public(visibility: &syn::Visibility) -> bool {
    matches!(visibility, syn::Visibility::Public(_))
}

/// Returns the value that `percent` of the values do not exceed, or 0 if there are no values.
pub fn quantile(mut values: Vec<usize>, percent: usize) -> usize {
    values.sort_unstable();
    let rank = (values.len() * percent).div_ceil(100);
    values.get(rank.max(1) - 1).copied().unwrap_or(0)
}
