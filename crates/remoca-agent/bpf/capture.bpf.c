// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Copies the pages that reclaim takes out of the page cache into a ring of slots.
 *
 * __filemap_remove_folio(folio, shadow) is called with a shadow exactly when reclaim evicts: truncation and drop_caches
 * pass none. It runs with interrupts off and the lock of the mapping held, so nothing here waits: a page that finds the
 * ring full is counted and lost. The host knows pages by their content, so only the bytes of a page are needed.
 *
 * The slots are whole pages that the reader has mapped, so it hands them to the disk as they are: each page is copied
 * once. Ticket t owns slot t mod slot count; it is taken by advancing `taken`, and given back by the reader's `freed`.
 */
#include "kernel.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define PAGE_BYTES 4096
#define PAGE_SHIFT 12

/* Attempts to take a ticket while other CPUs take theirs. */
#define TICKET_ATTEMPTS 16

/* State of a slot: its ticket + 1 once the page is in, with this bit if the copy failed. */
#define COPY_FAILED (1ULL << 63)

/* Shared with capture.rs (`Shared`), which maps it. Words written by the reader and by us lie on different lines. */
struct {
	/* Written by the reader. */
	volatile __u64 freed;         /* tickets before this one are done with */
	__u32 slot_mask;              /* slot count - 1; the count is a power of two */
	__u32 wakeup_mask;            /* the reader is woken when a ticket has none of these bits */
	volatile __u32 paused;        /* not 0: there is no port; count, copy nothing */
	volatile __u32 sample_one_in; /* above 1: copy about one page of so many */
	volatile __u32 reader_idle;   /* set by the reader before it sleeps, cleared by the page that wakes it */
	volatile __u32 classes;       /* above 1: copy only the pages of one class of so many */
	__u32 padding[8];
	/* Written here. */
	volatile __u64 taken; /* the next ticket */
	__u64 failed;         /* of those taken, without content */
	__u64 refused;        /* no slot was free, or there was no port */
	__u64 sampled_out;
	/* Where the direct map and the page array begin; read from the kernel at the first page. */
	__u64 page_offset_base;
	__u64 vmemmap_base;
} shared SEC(".data.shared");

/* The loader sets the slot count of both. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 2048);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, PAGE_BYTES);
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 2048);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(__u64));
} slot_states SEC(".maps");

/* Carries no data: the reader sleeps on it. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} wakeups SEC(".maps");

extern const void page_offset_base __ksym;
extern const void vmemmap_base __ksym;

struct pages {
	__u64 address;
	__u64 place; /* of the first page; see place_of */
	__u32 sample_one_in;
	__u32 classes;
};

static __always_inline bool sampled(__u32 one_in)
{
	return one_in <= 1 || ((__u64)bpf_get_prandom_u32() * one_in) >> 32 == 0;
}

/* Names a page by its file and its place there. File systems share their numbers of files, which does no harm. */
static __always_inline __u64 place_of(struct folio *folio)
{
	return (__u64)folio->mapping->host->i_ino * 0x9e3779b97f4a7c15ULL + folio->index;
}

/* Whether a page is of the class that is copied: the same pages each time, and about one page of so many. */
static __always_inline bool in_class(__u64 place, __u32 classes)
{
	if (classes <= 1)
		return true;
	place = (place ^ place >> 32) * 0xd6e8feb86659fd93ULL;
	place = (place ^ place >> 32) * 0xd6e8feb86659fd93ULL;
	return (place >> 32) * classes >> 32 == 0;
}

/* Takes a slot, with its ticket in `*ticket`; returns whether one was free. */
static __always_inline bool take_slot(__u64 *ticket)
{
	__u64 next = shared.taken;

	for (int attempt = 0; attempt < TICKET_ATTEMPTS; attempt++) {
		__u64 seen;

		if (next - shared.freed > shared.slot_mask)
			return false;
		seen = __sync_val_compare_and_swap(&shared.taken, next, next + 1);
		if (seen == next) {
			*ticket = next;
			return true;
		}
		next = seen;
	}
	return false;
}

/* Wakes the reader: once for many pages, at once if it had nothing to do. */
static __always_inline void wake_reader(__u64 ticket)
{
	void *nothing;

	if (!shared.reader_idle && ticket & shared.wakeup_mask)
		return;
	shared.reader_idle = 0;
	nothing = bpf_ringbuf_reserve(&wakeups, sizeof(__u64), 0);
	/* When it is full the reader is awake. */
	if (nothing)
		bpf_ringbuf_submit(nothing, BPF_RB_FORCE_WAKEUP);
}

static __always_inline void copy_page(__u64 address)
{
	__u64 ticket, state, *slot_state;
	__u32 index;
	void *slot;

	if (!take_slot(&ticket)) {
		__sync_fetch_and_add(&shared.refused, 1);
		return;
	}
	index = ticket & shared.slot_mask;
	slot = bpf_map_lookup_elem(&slots, &index);
	slot_state = bpf_map_lookup_elem(&slot_states, &index);
	if (!slot || !slot_state)
		return; /* cannot be: both have as many entries as the mask says */
	state = ticket + 1;
	if (bpf_probe_read_kernel(slot, PAGE_BYTES, (void *)address)) {
		__sync_fetch_and_add(&shared.failed, 1);
		state |= COPY_FAILED;
	}
	/* A full barrier: the reader sees the state only with the bytes. */
	__sync_lock_test_and_set(slot_state, state);
	wake_reader(ticket);
}

static long copy_one_of_many(__u32 index, void *context)
{
	struct pages *pages = context;

	if (in_class(pages->place + index, pages->classes) && sampled(pages->sample_one_in))
		copy_page(pages->address + ((__u64)index << PAGE_SHIFT));
	else
		__sync_fetch_and_add(&shared.sampled_out, 1);
	return 0;
}

static __always_inline __u64 flags_of(struct folio *folio)
{
	if (bpf_core_field_exists(folio->flags))
		return folio->flags;
	return ((struct folio___wrapped *)folio)->flags.f;
}

static __always_inline __u32 page_count_of(struct folio *folio, __u64 flags)
{
	if (!(flags & (1ULL << bpf_core_enum_value(enum pageflags, PG_head))))
		return 1;
	if (bpf_core_field_exists(folio->_folio_nr_pages))
		return folio->_folio_nr_pages;
	return ((struct folio___renamed *)folio)->_nr_pages;
}

/*
 * Pages of a block device, or of a file system on some. Network and overlay file systems have nothing on our disks. That
 * a file system has one device (s_bdev) would not do: btrfs may have several, and names none.
 */
static __always_inline bool on_a_disk(struct folio *folio)
{
	struct inode *inode = folio->mapping->host;

	return inode->i_rdev || inode->i_sb->s_type->fs_flags & FS_REQUIRES_DEV;
}

/* Returns the address of the page's bytes in the direct map; 0 if the kernel's bases cannot be read. */
static __always_inline __u64 address_of(__u64 folio)
{
	if (!shared.vmemmap_base) {
		__u64 base = 0;

		bpf_probe_read_kernel(&base, sizeof(base), &page_offset_base);
		shared.page_offset_base = base;
		base = 0;
		bpf_probe_read_kernel(&base, sizeof(base), &vmemmap_base);
		shared.vmemmap_base = base;
		if (!base)
			return 0;
	}
	return shared.page_offset_base +
	       ((folio - shared.vmemmap_base) / bpf_core_type_size(struct page) << PAGE_SHIFT);
}

SEC("fentry/__filemap_remove_folio")
int BPF_PROG(evicted, struct folio *folio, void *shadow)
{
	struct pages pages = {};
	__u64 flags, folio_address;
	__u32 page_count;

	if (!shadow)
		return 0;
	flags = flags_of(folio);
	if (flags & (1ULL << bpf_core_enum_value(enum pageflags, PG_swapbacked)) || !on_a_disk(folio))
		return 0;
	page_count = page_count_of(folio, flags);
	if (shared.paused) {
		__sync_fetch_and_add(&shared.refused, page_count);
		return 0;
	}
	pages.sample_one_in = shared.sample_one_in;
	pages.classes = shared.classes;
	if (pages.classes > 1)
		pages.place = place_of(folio);
	if (page_count == 1 && !(in_class(pages.place, pages.classes) && sampled(pages.sample_one_in))) {
		__sync_fetch_and_add(&shared.sampled_out, 1);
		return 0;
	}

	/* The verifier allows no arithmetic on the folio pointer itself; bpf_get_func_arg gives it as a number. */
	bpf_get_func_arg(ctx, 0, &folio_address);
	pages.address = address_of(folio_address);
	if (!pages.address) {
		__sync_fetch_and_add(&shared.refused, page_count);
		return 0;
	}
	if (page_count == 1)
		copy_page(pages.address);
	else
		bpf_loop(page_count, copy_one_of_many, &pages, 0);
	return 0;
}

/* The helpers used here are for GPL-compatible programs; MIT is. */
char LICENSE[] SEC("license") = "Dual MIT/GPL";
