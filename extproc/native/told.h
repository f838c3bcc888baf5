/* What another router tells of its own requests, counted in the records of the workers. */
#ifndef KVSTEER_TOLD_H
#define KVSTEER_TOLD_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>

PyObject *module_are_plain_figures(PyObject *module, PyObject *told);

PyObject *module_count_later(PyObject *module, PyObject *const *given, Py_ssize_t count);

/* Prepares the names of attributes; false after an error. */
bool told_prepare(void);

#endif
