/* Small steps from C to Python, which several files of the module take. */
#ifndef KVSTEER_OBJECTS_H
#define KVSTEER_OBJECTS_H

#include "hpack.h"

/* Returns a constant with a reference taken at run time: kvstate/native/module.c says why. */
static inline PyObject *constant(PyObject *object) {
    Py_IncRef(object);
    return object;
}

static inline PyObject *truth(bool is_so) { return constant(is_so ? Py_True : Py_False); }

static inline PyObject *bytes_of(Text text) {
    return PyBytes_FromStringAndSize((const char *)text.bytes, (Py_ssize_t)text.length);
}

#endif
