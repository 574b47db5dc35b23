use super::*;
use std::fs;

/// Makes a tree with one crate, and returns it with its functions.
fn tree_of(source: &str) -> (tempfile::TempDir, Vec<Function>) {
    let tree = tempfile::tempdir().unwrap();
    let folder = tree.path().join("crates/some-crate/src");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("lib.rs"), source).unwrap();
    let functions = items::functions(tree.path(), Path::new("crates/some-crate")).unwrap();
    (tree, functions)
}

fn listed(from: &str, to: &str) -> Listed {
    let (name, item, change) = ("name".into(), "some_crate::one".into(), "something".into());
    Listed { name, item, change, from: from.into(), to: to.into(), seen_by: vec!["a test".into()], harmless: None }
}

#[test]
fn the_list_of_the_project_matches_its_tree() {
    let functions = functions(&project()).unwrap();
    let listed = list::read(&project().join("xtask/mutants")).unwrap();
    let stale: Vec<_> = listed.iter().filter_map(|one| one.find(&functions).err()).collect();
    assert_eq!(stale, [""; 0], "the code has changed: mend these mutants, do not leave them out");
    assert!(listed.len() > 100);
}

#[test]
fn mutants_are_named_by_item_and_not_by_line() {
    let source = "fn one(a: u32, b: u32) -> bool {
            if a < b && ready() { count(4); }
            match a { 1 if ready() => false, 2 => return true, _ => a + 1 == b }
        }";
    let moved = format!("// Another line.\n\nfn other() {{}}\n{source}");
    let names = |source: &str| {
        let (_tree, functions) = tree_of(source);
        let one = functions.iter().find(|function| function.item.ends_with("one")).unwrap();
        let named = edits::generate(one);
        named.into_iter().map(|(name, edit)| format!("{} {}", &name[12..], edit.describe(one))).collect::<Vec<_>>()
    };
    assert_eq!(names(source), names(&moved));
    let expected = [
        "one#result.1 `{ if a < b && ready() { count(4); } match a { 1 if ready() => false, 2 => return true, _ => a + 1 == ...` -> `{ true }`",
        "one#negate.1 `a < b && ready()` -> `!(a < b && ready())`",
        "one#compare.1 `<` -> `<=`",
        "one#logic.1 `&&` -> `||`",
        "one#delete.1 without `count(4);`",
        "one#number.1 `4` -> `5`",
        "one#arm.1 without `1 if ready() => false,`",
        "one#negate.2 `ready()` -> `!(ready())`",
        "one#arm.2 without `2 => return true,`",
        "one#compute.1 `+` -> `-`",
        "one#number.2 `1` -> `2`",
        "one#compare.2 `==` -> `!=`",
    ];
    let found = names(source);
    assert_eq!(found[1], found[0].replace("{ true }", "{ false }").replace("result.1", "result.2"));
    assert_eq!([&found[..1], &found[2..]].concat(), expected);
}

#[test]
fn what_only_the_compiler_runs_is_left_alone() {
    let source = "const fn fixed() -> u32 { 1 + 1 }
        fn one(x: [u8; 4]) { const N: usize = 2 + 2; let [_, 3, ..] = x else { return }; trace!(1 + 1); if let 5 = x[0] {} }
        #[cfg(test)] fn helper() -> u32 { 1 + 1 }";
    let (_tree, functions) = tree_of(source);
    let found: Vec<_> = functions.iter().flat_map(edits::generate).map(|(name, _)| name).collect();
    assert_eq!(found, ["some_crate::one#result.1", "some_crate::one#number.1"], "the body, and the index");
}

#[test]
fn a_mutant_of_the_list_stands_once_however_it_is_wrapped() {
    let (_tree, functions) = tree_of("fn one() { first(1,\n   2); second(); second(); }");
    let (function, edit) = listed("first( 1, 2);", "").find(&functions).unwrap();
    assert_eq!(edit.apply(function), "{  second(); second(); }");
    let why = |from: &str, to: &str| listed(from, to).find(&functions).err().unwrap();
    assert!(why("second();", "").contains("stands 2 times"));
    assert!(why("third();", "").contains("stands 0 times"));
    assert!(why("first(1, 2);", "first(1,2);").contains("nothing changes"));
    let elsewhere = Listed { item: "some_crate::two".into(), ..listed("first(1, 2);", "") };
    assert!(elsewhere.find(&functions).err().unwrap().contains("no such function"));
}

#[test]
fn lists_say_who_sees_a_mutant_or_why_it_is_harmless() {
    let folder = tempfile::tempdir().unwrap();
    let read = |text: &str| {
        fs::write(folder.path().join("list.toml"), text).unwrap();
        list::read(folder.path()).map(|listed| listed.len())
    };
    let one = "[[mutant]]\nname = 'a'\nitem = 'b'\nchange = 'c'\nfrom = 'd'\nto = 'e'\n";
    assert_eq!(read(&format!("{one}seen_by = ['f']\n")), Ok(1));
    assert_eq!(read(&format!("{one}harmless = 'f'\n")), Ok(1));
    assert!(read(one).is_err());
    assert!(read(&format!("{one}seen_by = ['f']\nharmless = 'g'\n")).is_err());
    assert!(read(&format!("{one}seen_by = ['f']\n{one}seen_by = ['f']\n")).is_err());
    assert!(read(&format!("{one}seen-by = ['f']\n")).is_err());
}

#[test]
fn samples_depend_on_names_and_seed_only() {
    let sample = |source: &str, seed| {
        let (_tree, functions) = tree_of(source);
        let options = Options { sample: 3, seed, ..Options::default() };
        generated(&options, &functions, None, &|_| true).into_iter().map(|mutant| mutant.name).collect::<Vec<_>>()
    };
    let source = "fn one(a: u32) -> u32 { a + 1 - 2 * 3 } fn two() { a(); b(); c(); }";
    assert_eq!(sample(source, 1), sample(&format!("//\n{source} fn three() {{}}"), 1));
    assert_ne!(sample(source, 1), sample(source, 2));
}

/// Tests a program that adds, with a test that notices neither of two mutants.
#[test]
fn all_mutants_are_in_one_build_and_chosen_when_it_runs() {
    let (tree, functions) = tree_of(
        "fn one(a: u32) -> u32 { let b = a; b + 1 }
         #[test] fn sees() { assert_eq!(one(1), 2) }
         #[test] fn is_elsewhere() {}",
    );
    fs::create_dir(tree.path().join("target")).unwrap();
    fs::write(tree.path().join("Cargo.toml"), "[workspace]\nresolver = '3'\nmembers = ['crates/*']\n").unwrap();
    let manifest = "[package]\nname = 'some-crate'\nedition = '2024'\nversion = '0.1.0'\n";
    fs::write(tree.path().join("crates/some-crate/Cargo.toml"), manifest).unwrap();
    let mut mutants: Vec<_> =
        [("b + 1", "b - 1"), ("b + 1", "b + 1 + 0"), ("b + 1", "\"no number\""), ("a;", "a + 2;")]
            .into_iter()
            .map(|(from, to)| {
                let (_, edit) = listed(from, to).find(&functions).unwrap();
                Mutant { name: to.into(), function: 0, edit, listed: None, refused: None }
            })
            .collect();
    let work = tempfile::tempdir().unwrap();
    let (copy, target) = (work.path().join("src"), work.path().join("build"));
    let workshop = Workshop { tree: tree.path().into(), copy, target };
    let messages = workshop.build(&functions, &mut mutants, &["test".into(), "--no-run".into()]).unwrap();
    let refused: Vec<_> = mutants.iter().map(|mutant| mutant.refused.is_some()).collect();
    assert_eq!(refused, [false, false, true, false]);
    let bench = Bench { folder: work.path().join("bench"), workers: 2 };
    let tests = bench.record(bench.list(&messages).unwrap(), mutants.len()).unwrap();
    let reaches: BTreeMap<_, _> = tests.iter().map(|test| (&*test.name, &test.reaches[..])).collect();
    let expected = [("some-crate/unit::is_elsewhere", &[][..]), ("some-crate/unit::sees", &[0, 1, 3])];
    assert_eq!(reaches, BTreeMap::from(expected));
    let fate = |number| try_one(number, &tests, &[], Duration::from_secs(9999), work.path()).unwrap();
    let seen = Fate::Seen { by: "some-crate/unit::sees".into() };
    assert_eq!([fate(0), fate(3)], [seen.clone(), seen]);
    assert_eq!(fate(1), Fate::Survived { tests: 1, left_out: 0 });
    let small = try_one(0, &tests, &[], Duration::ZERO, work.path()).unwrap();
    assert_eq!(small, Fate::Survived { tests: 0, left_out: 1 });
}
