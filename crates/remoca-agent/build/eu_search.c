/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Debian 13's libelf.a (elfutils 0.192) calls these search trees and leaves them out. Linked where they are missing only.
 * The agent loads its object in one thread, so the lock behind the root is not needed.
 */
#define _GNU_SOURCE
#include <search.h>
#include <stddef.h>

struct search_tree {
	void *root;
};

typedef int compare_fn(const void *, const void *);

void *eu_tsearch(const void *key, struct search_tree *tree, compare_fn *compare)
{
	return tsearch(key, &tree->root, compare);
}

void *eu_tfind(const void *key, struct search_tree *tree, compare_fn *compare)
{
	return tfind(key, &tree->root, compare);
}

void *eu_tdelete(const void *key, struct search_tree *tree, compare_fn *compare)
{
	return tdelete(key, &tree->root, compare);
}

void eu_tdestroy(struct search_tree *tree, void (*free_node)(void *))
{
	tdestroy(tree->root, free_node);
	tree->root = NULL;
}

void eu_search_tree_init(struct search_tree *tree)
{
	tree->root = NULL;
}

void eu_search_tree_fini(struct search_tree *tree, void (*free_node)(void *))
{
	eu_tdestroy(tree, free_node);
}
