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

/* Reads a tuple of so many numbers; false after an error. PyArg_ParseTuple takes five times as long
 * for a tuple within others. */
static inline bool numbers_of(PyObject *tuple, double *numbers, Py_ssize_t count) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_TypeError, "wants %zd numbers", count);
        return false;
    }
    for (Py_ssize_t n = 0; n < count; n++) {
        numbers[n] = PyFloat_AsDouble(PyTuple_GetItem(tuple, n));
        if (numbers[n] == -1.0 && PyErr_Occurred()) return false;
    }
    return true;
}

#endif
