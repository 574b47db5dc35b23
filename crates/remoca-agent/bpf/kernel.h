/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The few kernel types that capture.bpf.c touches, and nothing else of them.
 *
 * Offsets here mean nothing: preserve_access_index makes clang record each access by name, and the loader fills in the
 * offsets of the running kernel from its BTF. So the build needs no kernel headers and no BTF of any kernel.
 * A name with three underscores is a "flavour": the loader strips what follows them before it looks the type up, which
 * is how a field that changed between kernels is described twice.
 */
#ifndef REMOCA_KERNEL_H
#define REMOCA_KERNEL_H

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef signed char __s8;
typedef short __s16;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u64 __be64;
typedef __u32 __wsum;
typedef _Bool bool;
enum { false, true };

/* From include/uapi/linux/bpf.h, which is ABI. */
enum { BPF_MAP_TYPE_ARRAY = 2, BPF_MAP_TYPE_RINGBUF = 27 };
enum { BPF_F_MMAPABLE = 1 << 10 };
enum { BPF_RB_FORCE_WAKEUP = 2 };

/* From include/linux/fs.h; unchanged since 2.6. */
enum { FS_REQUIRES_DEV = 1 };

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct file_system_type {
	int fs_flags;
};

struct super_block {
	struct file_system_type *s_type;
};

struct inode {
	struct super_block *i_sb;
	unsigned long i_ino;
	__u32 i_rdev;
};

struct address_space {
	struct inode *host;
};

/* Only its size counts: the stride of the page array. */
struct page {
	unsigned long flags;
};

struct folio {
	unsigned long flags;
	struct address_space *mapping;
	unsigned long index;
	unsigned int _folio_nr_pages;
};

/* 6.15 renamed the page count. */
struct folio___renamed {
	unsigned int _nr_pages;
};

/* 6.18 put the flags into a structure of their own. */
struct folio___wrapped {
	struct {
		unsigned long f;
	} flags;
};

#pragma clang attribute pop

/* The values differ between kernels and configurations: read with bpf_core_enum_value only. */
enum pageflags {
	PG_head = 0,
	PG_swapbacked = 1,
};

#endif
