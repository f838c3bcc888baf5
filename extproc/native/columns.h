/* What the module gets of columns.c. */
#ifndef KVSTEER_COLUMNS_H
#define KVSTEER_COLUMNS_H

#include <stdbool.h>

extern PyType_Spec columns_spec;
PyObject *module_load_of(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *module_evicted(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *module_drawn(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *module_lowest(PyObject *module, PyObject *const *given, Py_ssize_t count);

/* Makes the names of attributes; false after an error. */
bool columns_prepare(void);

#endif
