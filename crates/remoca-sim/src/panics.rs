//! Panics of the engine are violations like others. They are caught, with their text and place, and not printed.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

thread_local! {
    static CATCHING: Cell<bool> = const { Cell::new(false) };
    static TEXT: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `body`, and catches its panic.
///
/// # Errors
/// The text of the panic.
pub(crate) fn catch<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if CATCHING.get() {
                TEXT.replace(info.to_string());
            } else {
                others(info);
            }
        }));
    });
    CATCHING.set(true);
    // Afterwards, the world is only asked for its trace and its counters.
    let outcome = catch_unwind(AssertUnwindSafe(body));
    CATCHING.set(false);
    outcome.map_err(|_| TEXT.take())
}
