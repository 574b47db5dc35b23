// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Copies the pages that reclaim takes out of the page cache into a ring buffer.
 *
 * __filemap_remove_folio(folio, shadow) is called with a shadow exactly when reclaim evicts: truncation and drop_caches
 * pass none. It runs with interrupts off and the lock of the mapping held, so nothing here waits: a page that finds the
 * ring full is counted and lost. The host knows pages by their content, so all that is needed of one is its bytes.
 */
#include "kernel.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define PAGE_BYTES 4096
#define PAGE_SHIFT 12

/* The reader is woken once for so many pages; what is left over it fetches by its own timer. */
#define PAGES_PER_WAKEUP 128

/* Shared with capture.rs (`Shared`), which maps it. Words written by the reader and by us lie on different lines. */
struct {
	/* Written by the reader. */
	volatile __u32 paused;        /* not 0: there is no port; count, copy nothing */
	volatile __u32 sample_one_in; /* above 1: copy about one page of so many */
	volatile __u32 reader_idle;   /* set by the reader before it sleeps, cleared by the page that wakes it */
	__u32 padding[13];
	/* Written here. */
	__u64 captured;
	__u64 lost;
	__u64 sampled_out;
	/* Where the direct map and the page array begin; read from the kernel at the first page. */
	__u64 page_offset_base;
	__u64 vmemmap_base;
} shared SEC(".data.shared");

/* The loader sets the size. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 8 << 20);
} ring SEC(".maps");

extern const void page_offset_base __ksym;
extern const void vmemmap_base __ksym;

struct pages {
	__u64 address;
	__u32 sample_one_in;
};

static __always_inline bool sampled(__u32 one_in)
{
	return one_in <= 1 || ((__u64)bpf_get_prandom_u32() * one_in) >> 32 == 0;
}

static __always_inline __u64 wakeup(void)
{
	__u64 captured = __sync_fetch_and_add(&shared.captured, 1);

	if (shared.reader_idle) {
		shared.reader_idle = 0;
		return BPF_RB_FORCE_WAKEUP;
	}
	return captured % PAGES_PER_WAKEUP == 0 ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}

static __always_inline void copy_page(__u64 address)
{
	void *copy = bpf_ringbuf_reserve(&ring, PAGE_BYTES, 0);

	if (!copy) {
		__sync_fetch_and_add(&shared.lost, 1);
		return;
	}
	if (bpf_probe_read_kernel(copy, PAGE_BYTES, (void *)address)) {
		__sync_fetch_and_add(&shared.lost, 1);
		bpf_ringbuf_discard(copy, BPF_RB_NO_WAKEUP);
		return;
	}
	bpf_ringbuf_submit(copy, wakeup());
}

static long copy_one_of_many(__u32 index, void *context)
{
	struct pages *pages = context;

	if (sampled(pages->sample_one_in))
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

/* Pages of a block device, or of a file system on one. Network and overlay file systems have nothing on our disks. */
static __always_inline bool on_a_disk(struct folio *folio)
{
	struct inode *inode = folio->mapping->host;

	return inode->i_rdev || inode->i_sb->s_bdev;
}

/* The address of the page's bytes in the direct map; 0 when the kernel's bases cannot be read. */
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
		__sync_fetch_and_add(&shared.lost, page_count);
		return 0;
	}
	pages.sample_one_in = shared.sample_one_in;
	if (page_count == 1 && !sampled(pages.sample_one_in)) {
		__sync_fetch_and_add(&shared.sampled_out, 1);
		return 0;
	}

	/* The verifier allows no arithmetic on the folio pointer itself; bpf_get_func_arg gives it as a number. */
	bpf_get_func_arg(ctx, 0, &folio_address);
	pages.address = address_of(folio_address);
	if (!pages.address) {
		__sync_fetch_and_add(&shared.lost, page_count);
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
