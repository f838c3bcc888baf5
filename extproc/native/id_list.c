/* Token ids as JSON: extproc/_core.pyi describes the function. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#include "id_list.h"

/* Ids from here on stand for longer ones (kvstate.overlap). */
#define FIRST_WIDE_TOKEN 0x80000000u

/* A comma, and the ten digits of the largest id. */
#define MAX_ID_BYTES 11

static char *written(char *at, uint32_t id) {
    char digits[MAX_ID_BYTES];
    int count = 0;
    do {
        digits[count++] = (char)('0' + id % 10);
        id /= 10;
    } while (id);
    while (count) *at++ = digits[--count];
    return at;
}

static PyObject *listed(const Py_buffer *ids) {
    Py_ssize_t count = ids->len / (Py_ssize_t)sizeof(uint32_t);
    char *text = PyMem_Malloc((size_t)count * MAX_ID_BYTES + 2);
    if (!text) return PyErr_NoMemory();
    char *at = text;
    *at++ = '[';
    for (Py_ssize_t n = 0; n < count; n++) {
        uint32_t id;
        memcpy(&id, (const char *)ids->buf + n * (Py_ssize_t)sizeof id, sizeof id);
        if (id >= FIRST_WIDE_TOKEN) {
            PyMem_Free(text);
            PyErr_SetString(PyExc_ValueError, "an id stands for a longer one");
            return NULL;
        }
        if (n) *at++ = ',';
        at = written(at, id);
    }
    *at++ = ']';
    PyObject *made = PyBytes_FromStringAndSize(text, at - text);
    PyMem_Free(text);
    return made;
}

/* id_list(tokens) */
PyObject *module_id_list(PyObject *Py_UNUSED(module), PyObject *tokens) {
    Py_buffer ids;
    if (PyObject_GetBuffer(tokens, &ids, PyBUF_SIMPLE)) return NULL;
    PyObject *made = listed(&ids);
    PyBuffer_Release(&ids);
    return made;
}
