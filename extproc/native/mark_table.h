/* The claims at marks, which extproc.routing.claims.claim_table takes from extproc._core. */
#ifndef KVSTEER_MARK_TABLE_H
#define KVSTEER_MARK_TABLE_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { MARK_KEY_BYTES = 8 };

/* Reads the key of a mark: extproc.routing.marks.packed has the layout. */
static inline uint64_t mark_key_read(const char *from) {
    uint64_t key;
    memcpy(&key, from, sizeof key);
    return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? key : __builtin_bswap64(key);
}

extern PyType_Spec mark_table_spec;

PyObject *module_expected(PyObject *module, PyObject *const *given, Py_ssize_t count);

/* Prepares the names of attributes, and notes the type; false after an error. */
bool mark_table_prepare(PyObject *type);

#endif
