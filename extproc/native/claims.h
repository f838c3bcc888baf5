/* The functions that extproc.routing.claims and marks take from extproc._core. */
#ifndef KVSTEER_CLAIMS_H
#define KVSTEER_CLAIMS_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>

PyObject *module_chained(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *module_weighed(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *module_held(PyObject *module, PyObject *const *given, Py_ssize_t count);

/* Prepares the names of attributes; false after an error. */
bool claims_prepare(void);

#endif
