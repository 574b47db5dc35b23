//! What the terminal shows and how keys change it. Pure.

use crate::columns::{self, COLUMNS, Row};
use crate::snapshot::Snapshot;
use crate::vm::Vm;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::cmp::Ordering;
use std::sync::Arc;

/// State of the screen.
#[derive(Default)]
pub struct App {
    pub snapshot: Option<Arc<Snapshot>>,
    /// Why there is no newer snapshot.
    pub error: Option<String>,
    pub order: Order,
    /// Name of the VM that is selected.
    pub selected: Option<String>,
    pub has_details: bool,
    /// First line of the details that is shown.
    pub scroll: u16,
}

/// Order of the VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Column that decides, or `None` for the names.
    pub column: Option<usize>,
    pub is_reversed: bool,
}

/// What the program does after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Draw,
    Quit,
}

impl App {
    /// Returns the rows in their order.
    #[must_use]
    pub fn rows(&self) -> Vec<Row> {
        let mut rows = self.snapshot.as_deref().map(columns::rows).unwrap_or_default();
        rows.sort_by(|one, other| self.order.compare(one, other));
        rows
    }

    /// Returns the selected VM: the first one if none was, or it is gone.
    #[must_use]
    pub fn vm(&self) -> Option<&Vm> {
        let snapshot = self.snapshot.as_ref()?;
        let name = self.rows().get(self.place())?.name.clone();
        snapshot.vms.iter().find(|vm| vm.name == name)
    }

    /// Returns the place of the selected VM among the rows.
    #[must_use]
    pub fn place(&self) -> usize {
        let is_selected = |row: &Row| Some(&row.name) == self.selected.as_ref();
        self.rows().iter().position(is_selected).unwrap_or(0)
    }

    /// Takes a new snapshot, or why there is none.
    pub fn take(&mut self, snapshot: Result<Arc<Snapshot>, String>) {
        match snapshot {
            Ok(snapshot) => (self.snapshot, self.error) = (Some(snapshot), None),
            Err(error) => self.error = Some(error),
        }
    }

    /// Does what a key says.
    pub fn press(&mut self, key: KeyEvent) -> Next {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if key.kind == KeyEventKind::Release {
            return Next::Draw;
        }
        match key.code {
            KeyCode::Char('q') => return Next::Quit,
            KeyCode::Char('c') if is_control => return Next::Quit,
            KeyCode::Esc if !self.has_details => return Next::Quit,
            KeyCode::Esc => self.has_details = false,
            KeyCode::Enter | KeyCode::Char(' ') => (self.has_details, self.scroll) = (!self.has_details, 0),
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::Home => self.select(isize::MIN),
            KeyCode::End => self.select(isize::MAX),
            KeyCode::PageDown if self.has_details => self.scroll = self.scroll.saturating_add(5),
            KeyCode::PageUp if self.has_details => self.scroll = self.scroll.saturating_sub(5),
            KeyCode::PageDown => self.select(20),
            KeyCode::PageUp => self.select(-20),
            KeyCode::Right | KeyCode::Char('>') => self.order.column = next(self.order.column, true),
            KeyCode::Left | KeyCode::Char('<') => self.order.column = next(self.order.column, false),
            KeyCode::Char('r') => self.order.is_reversed ^= true,
            _ => {}
        }
        Next::Draw
    }

    /// Selects the VM that is `by` rows below, or the last or first one.
    fn select(&mut self, by: isize) {
        let rows = self.rows();
        let last = rows.len().saturating_sub(1);
        let place = self.place().saturating_add_signed(by).min(last);
        self.selected = rows.get(place).map(|row| row.name.clone());
        self.scroll = 0;
    }
}

/// Returns the column to the right or to the left of this one; the names are before the first.
fn next(column: Option<usize>, is_right: bool) -> Option<usize> {
    match (column, is_right) {
        (None, true) => Some(0),
        (Some(at), true) => Some((at + 1).min(COLUMNS.len() - 1)),
        (None, false) => None,
        (Some(at), false) => at.checked_sub(1),
    }
}

impl Order {
    /// Returns which of two rows comes first: the larger one, or the one whose name is first.
    fn compare(self, one: &Row, other: &Row) -> Ordering {
        let by_name = || one.name.cmp(&other.name);
        let ordering = match self.column {
            None => by_name(),
            Some(at) if COLUMNS[at].is_number => {
                let value = |row: &Row| row.cells[at].value.unwrap_or(f64::NEG_INFINITY);
                value(other).total_cmp(&value(one)).then_with(by_name)
            }
            Some(at) => one.cells[at].text.cmp(&other.cells[at].text).then_with(by_name),
        };
        if self.is_reversed { ordering.reverse() } else { ordering }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::full_snapshot;

    fn press(app: &mut App, code: KeyCode) -> Next {
        app.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn keys_select_sort_and_quit() {
        let mut app = App::default();
        assert!(app.vm().is_none() && press(&mut app, KeyCode::Down) == Next::Draw, "without a snapshot");
        app.take(Ok(Arc::new(full_snapshot(4))));
        assert_eq!(app.vm().map(|vm| vm.name.as_str()), Some("web000"));
        press(&mut app, KeyCode::Down);
        press(&mut app, KeyCode::Down);
        assert_eq!(app.selected.as_deref(), Some("web002"));
        press(&mut app, KeyCode::End);
        press(&mut app, KeyCode::Down);
        assert_eq!(app.selected.as_deref(), Some("web003"));
        press(&mut app, KeyCode::Home);
        assert_eq!(app.selected.as_deref(), Some("web000"));
        // The largest cache first. What is selected stays so.
        press(&mut app, KeyCode::Right);
        assert_eq!((app.order.column, app.rows()[0].name.as_str(), app.place()), (Some(0), "web003", 3));
        press(&mut app, KeyCode::Char('r'));
        assert_eq!(app.place(), 0);
        press(&mut app, KeyCode::Left);
        press(&mut app, KeyCode::Left);
        assert_eq!(app.order.column, None);
        press(&mut app, KeyCode::Enter);
        assert!(app.has_details);
        assert_eq!((press(&mut app, KeyCode::Esc), app.has_details), (Next::Draw, false));
        assert_eq!(press(&mut app, KeyCode::Esc), Next::Quit);
        assert_eq!(app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Next::Quit);
    }

    #[test]
    fn a_lost_source_is_said_and_the_last_snapshot_stays() {
        let mut app = App::default();
        app.take(Ok(Arc::new(full_snapshot(1))));
        app.take(Err("gone".into()));
        assert!(app.snapshot.is_some() && app.error.as_deref() == Some("gone"));
    }
}
