//! Generated mutants: small changes of a function's body.

use super::items::Function;
use std::ops::Range;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// A change of the source of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edit {
    /// Replaced range, as bytes of the file.
    pub range: Range<usize>,
    pub text: String,
    pub kind: &'static str,
}

impl Edit {
    /// Returns the body with this change.
    pub fn apply(&self, function: &Function) -> String {
        let (text, start) = (function.text(), function.body.start);
        format!("{}{}{}", &text[..self.range.start - start], self.text, &text[self.range.end - start..])
    }

    /// Returns the old and the new text, each on one line.
    pub fn describe(&self, function: &Function) -> String {
        let line = |text: &str| {
            let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
            match words.char_indices().nth(100) {
                Some((at, _)) => format!("{} ...", &words[..at]),
                None => words,
            }
        };
        let (from, to) = (line(&function.source.text[self.range.clone()]), line(&self.text));
        match &*to {
            "" => format!("without `{from}`"),
            _ => format!("`{from}` -> `{to}`"),
        }
    }
}

/// Returns the edits of a function, each with its name: `item#kind.N`, where N counts the edits of a kind in source order.
pub fn generate(function: &Function) -> Vec<(String, Edit)> {
    if function.item.ends_with("::fmt") {
        return Vec::new();
    }
    let mut finder = Finder { source: &function.source.text, edits: Vec::new() };
    finder.whole(function);
    finder.visit_block(&function.block);
    let mut edits = finder.edits;
    edits.sort_by_key(|edit| (edit.range.start, edit.range.end));
    let mut counts = std::collections::BTreeMap::new();
    let named = edits.into_iter().map(|edit| {
        let count: &mut usize = counts.entry(edit.kind).or_default();
        *count += 1;
        (format!("{}#{}.{count}", function.item, edit.kind), edit)
    });
    named.collect()
}

/// Returns the start of the innermost statement around a position of the body.
pub fn statement_at(function: &Function, at: usize) -> usize {
    struct Statements {
        at: usize,
        found: Option<Range<usize>>,
    }
    impl<'a> Visit<'a> for Statements {
        fn visit_stmt(&mut self, statement: &'a syn::Stmt) {
            let range = statement.span().byte_range();
            // A node that does not contain the position has no inner node that does.
            if range.contains(&self.at) {
                if !matches!(statement, syn::Stmt::Item(_)) {
                    self.found = Some(range);
                }
                visit::visit_stmt(self, statement);
            }
        }
    }
    let mut statements = Statements { at, found: None };
    statements.visit_block(&function.block);
    statements.found.map_or(function.body.start + 1, |range| range.start)
}

struct Finder<'a> {
    source: &'a str,
    edits: Vec<Edit>,
}

impl Finder<'_> {
    fn add(&mut self, kind: &'static str, range: Range<usize>, text: impl Into<String>) {
        self.edits.push(Edit { range, text: text.into(), kind });
    }

    /// Adds edits of the whole body: it does nothing, or returns a value of the type at once.
    fn whole(&mut self, function: &Function) {
        if function.block.stmts.is_empty() {
            return;
        }
        let values: &[&str] = match &function.output {
            syn::ReturnType::Default => &["{}"],
            syn::ReturnType::Type(_, kind) => {
                let kind = kind.span().source_text().unwrap_or_default();
                match kind.split(['<', '(']).next().unwrap_or_default().rsplit("::").next().unwrap_or_default() {
                    "bool" => &["{ true }", "{ false }"],
                    "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" => &["{ 0 }", "{ 1 }"],
                    "Option" => &["{ None }"],
                    "Vec" => &["{ Vec::new() }"],
                    "Result" if kind.contains("<()") => &["{ Ok(()) }"],
                    _ => &[],
                }
            }
        };
        let body = self.source[function.body.clone()].split_whitespace().collect::<Vec<_>>().join(" ");
        for value in values.iter().filter(|value| **value != body) {
            self.add("result", function.body.clone(), *value);
        }
    }

    fn negate(&mut self, condition: &syn::Expr) {
        let compares = |op: &syn::BinOp| other_operator(op).is_some_and(|(kind, _)| kind == "compare");
        let changed = match condition {
            syn::Expr::Let(_) => true,
            syn::Expr::Binary(binary) => compares(&binary.op),
            _ => false,
        };
        if !changed && !has_let(condition) {
            let range = condition.span().byte_range();
            let text = format!("!({})", &self.source[range.clone()]);
            self.add("negate", range, text);
        }
    }
}

impl<'a> Visit<'a> for Finder<'_> {
    fn visit_expr_binary(&mut self, binary: &'a syn::ExprBinary) {
        if let Some((kind, text)) = other_operator(&binary.op)
            && !(kind == "logic" && has_let_in(binary))
        {
            self.add(kind, binary.op.span().byte_range(), text);
        }
        visit::visit_expr_binary(self, binary);
    }

    fn visit_expr_if(&mut self, condition: &'a syn::ExprIf) {
        self.negate(&condition.cond);
        visit::visit_expr_if(self, condition);
    }

    fn visit_expr_while(&mut self, repeated: &'a syn::ExprWhile) {
        self.negate(&repeated.cond);
        visit::visit_expr_while(self, repeated);
    }

    fn visit_expr_match(&mut self, choice: &'a syn::ExprMatch) {
        let is_rest = |arm: &syn::Arm| matches!(arm.pat, syn::Pat::Wild(_)) && arm.guard.is_none();
        let has_rest = choice.arms.last().is_some_and(is_rest);
        for arm in &choice.arms {
            if let Some((_, guard)) = &arm.guard {
                self.negate(guard);
            }
            if has_rest && !is_rest(arm) {
                self.add("arm", arm.span().byte_range(), "");
            }
        }
        visit::visit_expr_match(self, choice);
    }

    fn visit_stmt(&mut self, statement: &'a syn::Stmt) {
        if let syn::Stmt::Expr(expression, Some(_)) = statement
            && is_done_for_its_effect(expression)
        {
            let range = statement.span().byte_range();
            if !self.source[range.clone()].contains("narrow::") {
                self.add("delete", range, "");
            }
        }
        visit::visit_stmt(self, statement);
    }

    fn visit_lit_int(&mut self, literal: &'a syn::LitInt) {
        if let Ok(value) = literal.base10_parse::<u128>() {
            let text = format!("{}{}", value + 1, literal.suffix());
            self.add("number", literal.span().byte_range(), text);
        }
    }

    // Patterns, types and constants are evaluated by the compiler; bodies of inner items belong to those items.
    fn visit_pat(&mut self, _: &'a syn::Pat) {}
    fn visit_type(&mut self, _: &'a syn::Type) {}
    fn visit_item(&mut self, _: &'a syn::Item) {}
    fn visit_attribute(&mut self, _: &'a syn::Attribute) {}
    fn visit_expr_repeat(&mut self, array: &'a syn::ExprRepeat) {
        self.visit_expr(&array.expr);
    }
}

fn is_done_for_its_effect(expression: &syn::Expr) -> bool {
    match expression {
        syn::Expr::MethodCall(_) | syn::Expr::Call(_) | syn::Expr::Assign(_) => true,
        syn::Expr::Binary(binary) => other_operator(&binary.op).is_some_and(|(kind, _)| kind == "assign"),
        syn::Expr::Try(inner) => is_done_for_its_effect(&inner.expr),
        _ => false,
    }
}

fn has_let(expression: &syn::Expr) -> bool {
    match expression {
        syn::Expr::Let(_) => true,
        syn::Expr::Binary(binary) => has_let_in(binary),
        _ => false,
    }
}

fn has_let_in(binary: &syn::ExprBinary) -> bool {
    has_let(&binary.left) || has_let(&binary.right)
}

fn other_operator(operator: &syn::BinOp) -> Option<(&'static str, &'static str)> {
    use syn::BinOp;
    Some(match operator {
        BinOp::Lt(_) => ("compare", "<="),
        BinOp::Le(_) => ("compare", "<"),
        BinOp::Gt(_) => ("compare", ">="),
        BinOp::Ge(_) => ("compare", ">"),
        BinOp::Eq(_) => ("compare", "!="),
        BinOp::Ne(_) => ("compare", "=="),
        BinOp::And(_) => ("logic", "||"),
        BinOp::Or(_) => ("logic", "&&"),
        BinOp::Add(_) => ("compute", "-"),
        BinOp::Sub(_) => ("compute", "+"),
        BinOp::Mul(_) => ("compute", "/"),
        BinOp::Div(_) => ("compute", "*"),
        BinOp::Rem(_) => ("compute", "/"),
        BinOp::Shl(_) => ("compute", ">>"),
        BinOp::Shr(_) => ("compute", "<<"),
        BinOp::BitAnd(_) => ("compute", "|"),
        BinOp::BitOr(_) => ("compute", "&"),
        BinOp::AddAssign(_) => ("assign", "-="),
        BinOp::SubAssign(_) => ("assign", "+="),
        BinOp::BitOrAssign(_) => ("assign", "&="),
        BinOp::BitAndAssign(_) => ("assign", "|="),
        _ => return None,
    })
}
