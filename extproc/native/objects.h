/* Small steps from C to Python, which several files of the module take. */
#ifndef KVSTEER_OBJECTS_H
#define KVSTEER_OBJECTS_H

#include <string.h>

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

/* Says that a function wants so many arguments; always false. */
static inline bool wants(Py_ssize_t count) {
    PyErr_Format(PyExc_TypeError, "wants %zd arguments", count);
    return false;
}

/* Whether a function was given what it wants, by letters: a dictionary, a list, a tuple, bytes, or
 * anything else; false after an error. PyArg_ParseTuple takes ten times as long. */
static inline bool are_given(PyObject *const *given, Py_ssize_t count, const char *letters) {
    Py_ssize_t n = 0;
    for (; letters[n]; n++) {
        if (n >= count) break;
        bool is_one = letters[n] == 'd'   ? PyDict_Check(given[n])
                      : letters[n] == 'l' ? PyList_Check(given[n])
                      : letters[n] == 't' ? PyTuple_Check(given[n])
                      : letters[n] == 'b' ? PyBytes_Check(given[n])
                                          : true;
        if (is_one) continue;
        PyErr_Format(PyExc_TypeError, "argument %zd is of another type", n + 1);
        return false;
    }
    return (n == count && !letters[n]) || wants((Py_ssize_t)strlen(letters));
}

/* Reads so many numbers that a function was given; false after an error. */
static inline bool read_numbers(PyObject *const *given, double *numbers, Py_ssize_t count) {
    for (Py_ssize_t n = 0; n < count; n++) {
        numbers[n] = PyFloat_AsDouble(given[n]);
        if (numbers[n] == -1.0 && PyErr_Occurred()) return false;
    }
    return true;
}

/* Reads a size that a function was given; false after an error. */
static inline bool read_size(PyObject *given, Py_ssize_t *size) {
    *size = PyLong_AsSsize_t(given);
    return *size != -1 || !PyErr_Occurred();
}

/* As numbers_of, of the arguments of a function. */
static inline bool numbers_given(PyObject *const *given, Py_ssize_t were, double *numbers,
                                 Py_ssize_t count) {
    return were == count ? read_numbers(given, numbers, count) : wants(count);
}

#endif
