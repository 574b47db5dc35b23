//! The functions of a crate, by name and position.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use syn::spanned::Spanned;

/// A source file.
pub struct Source {
    /// Path within the tree.
    pub path: PathBuf,
    pub text: String,
}

/// A function whose body can be replaced at run time.
pub struct Function {
    /// `crate::module::Type::function`, or `crate::module::<Type as Trait>::function`.
    pub item: String,
    pub source: Rc<Source>,
    /// Range of its body in the source, including the braces.
    pub body: Range<usize>,
    pub block: syn::Block,
    pub output: syn::ReturnType,
}

impl Function {
    /// Returns the text of the body, including the braces.
    pub fn text(&self) -> &str {
        &self.source.text[self.body.clone()]
    }
}

/// Returns all functions of the crate in `folder` (within `tree`) that are built outside of its tests.
///
/// # Errors
/// The name of the file that cannot be read or parsed.
pub fn functions(tree: &Path, folder: &Path) -> Result<Vec<Function>, String> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().replace('-', "_");
    let mut found = Vec::new();
    let mut walk = Walk { tree, found: &mut found };
    walk.file(&root(tree, folder), &folder.join("src"), &name)?;
    Ok(found)
}

/// Returns the root file of a crate.
pub fn root(tree: &Path, folder: &Path) -> PathBuf {
    let library = folder.join("src/lib.rs");
    if tree.join(&library).is_file() { library } else { folder.join("src/main.rs") }
}

struct Walk<'a> {
    tree: &'a Path,
    found: &'a mut Vec<Function>,
}

impl Walk<'_> {
    /// Reads a file. `children` is the folder of its modules' files.
    fn file(&mut self, path: &Path, children: &Path, module: &str) -> Result<(), String> {
        let text = fs::read_to_string(self.tree.join(path)).map_err(|error| format!("{}: {error}", path.display()))?;
        let file = syn::parse_file(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let source = Rc::new(Source { path: path.into(), text });
        self.items(&file.items, &source, children, module)
    }

    fn items(&mut self, items: &[syn::Item], source: &Rc<Source>, children: &Path, module: &str) -> Result<(), String> {
        for item in items {
            match item {
                syn::Item::Fn(function) if !is_for_tests(&function.attrs) => {
                    self.function(module, source, &function.sig, &function.block);
                }
                syn::Item::Impl(block) if !is_for_tests(&block.attrs) => {
                    let owner = format!("{module}::{}", owner(block));
                    for item in &block.items {
                        if let syn::ImplItem::Fn(method) = item
                            && !is_for_tests(&method.attrs)
                        {
                            self.function(&owner, source, &method.sig, &method.block);
                        }
                    }
                }
                syn::Item::Trait(block) if !is_for_tests(&block.attrs) => {
                    for item in &block.items {
                        if let syn::TraitItem::Fn(syn::TraitItemFn { sig, default: Some(body), .. }) = item {
                            self.function(&format!("{module}::{}", block.ident), source, sig, body);
                        }
                    }
                }
                syn::Item::Mod(inner) if !is_for_tests(&inner.attrs) => {
                    self.module(inner, source, children, module)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn module(
        &mut self,
        inner: &syn::ItemMod,
        source: &Rc<Source>,
        children: &Path,
        module: &str,
    ) -> Result<(), String> {
        let name = inner.ident.to_string();
        let (own, module) = (children.join(&name), format!("{module}::{name}"));
        if let Some((_, items)) = &inner.content {
            return self.items(items, source, &own, &module);
        }
        let file = children.join(format!("{name}.rs"));
        let file = if self.tree.join(&file).is_file() { file } else { own.join("mod.rs") };
        self.file(&file, &own, &module)
    }

    fn function(&mut self, owner: &str, source: &Rc<Source>, signature: &syn::Signature, block: &syn::Block) {
        // A const function may run in the compiler, where no mutant can be selected.
        if signature.constness.is_none() {
            self.found.push(Function {
                item: format!("{owner}::{}", signature.ident),
                source: Rc::clone(source),
                body: block.span().byte_range(),
                block: block.clone(),
                output: signature.output.clone(),
            });
        }
    }
}

/// Returns `Type`, or `<Type as Trait>`.
fn owner(block: &syn::ItemImpl) -> String {
    let text = |span: proc_macro2::Span| span.source_text().unwrap_or_default().replace(char::is_whitespace, "");
    let owner = match &*block.self_ty {
        syn::Type::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()).unwrap_or_default(),
        other => text(other.span()),
    };
    match &block.trait_ {
        Some((_, path, _)) => format!("<{owner} as {}>", text(path.span())),
        None => owner,
    }
}

/// Returns whether the item is a test, or part of a build that is only for tests or the fuzzer.
fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::Path(path) => path.is_ident("test"),
        syn::Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            !condition.starts_with("not") && ["test", "fuzz"].iter().any(|word| condition.contains(word))
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_module_type_and_trait_and_tests_are_left_out() {
        let tree = tempfile::tempdir().unwrap();
        let folder = tree.path().join("crates/some-crate/src");
        fs::create_dir_all(folder.join("inner")).unwrap();
        let text =
            "mod inner; fn free() {} const fn fixed() {} #[cfg(test)] mod tests { fn no() {} } #[cfg(test)] mod gone;";
        fs::write(folder.join("lib.rs"), text).unwrap();
        let text = "impl<T> Some<T> { fn own(&self) { let ü = 1; } } impl From<&str> for Some { fn from() { other() } } mod deep;";
        fs::write(folder.join("inner/mod.rs"), text).unwrap();
        fs::write(folder.join("inner/deep.rs"), "trait Kind { fn given() {} fn asked(); }").unwrap();
        let found = functions(tree.path(), Path::new("crates/some-crate")).unwrap();
        let names: Vec<_> = found.iter().map(|function| &*function.item).collect();
        let inner = "some_crate::inner";
        let expected = [
            &format!("{inner}::Some::own"),
            &format!("{inner}::<Some as From<&str>>::from"),
            &format!("{inner}::deep::Kind::given"),
            "some_crate::free",
        ];
        assert_eq!(names, expected);
        assert_eq!(found[0].text(), "{ let ü = 1; }");
        assert_eq!(found[1].text(), "{ other() }", "places are bytes, whatever stands before");
    }
}
