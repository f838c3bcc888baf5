/* The function that extproc.observing.buckets takes from extproc._core. */
#ifndef KVSTEER_BUCKETS_H
#define KVSTEER_BUCKETS_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

PyObject *module_bucketed(PyObject *module, PyObject *const *given, Py_ssize_t count);

#endif
