/* Counts values by bounds: extproc/observing/buckets.py describes it and has the same in
 * Python. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>

#include "buckets.h"
#include "objects.h"

enum { MOST_BOUNDS = 32 };

/* Observations by bounds. counts: for each bound, and for larger values. */
typedef struct {
    double bounds[MOST_BOUNDS];
    Py_ssize_t bound_count;
    long long counts[MOST_BOUNDS + 1];
    double total;
} Tally;

static bool tally_read(Tally *tally, PyObject *bounds) {
    *tally = (Tally){.bound_count = PyTuple_Size(bounds)};
    if (tally->bound_count > MOST_BOUNDS) {
        PyErr_SetString(PyExc_ValueError, "too many bounds");
        return false;
    }
    return numbers_of(bounds, tally->bounds, tally->bound_count);
}

static void tally_observe(Tally *tally, double value) {
    Py_ssize_t at = 0;
    while (at < tally->bound_count && value > tally->bounds[at]) at++;
    tally->counts[at]++;
    tally->total += value;
}

/* bucketed(bounds, values): (counts, total). */
PyObject *module_bucketed(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    Tally tally;
    if (!are_given(given, were, "tl") || !tally_read(&tally, given[0])) return NULL;
    for (Py_ssize_t n = 0; n < PyList_Size(given[1]); n++) {
        double value = PyFloat_AsDouble(PyList_GetItem(given[1], n));
        if (value == -1.0 && PyErr_Occurred()) return NULL;
        tally_observe(&tally, value);
    }
    PyObject *counts = PyList_New(tally.bound_count + 1);
    for (Py_ssize_t n = 0; counts && n <= tally.bound_count; n++) {
        PyObject *count = PyLong_FromLongLong(tally.counts[n]);
        if (!count || PyList_SetItem(counts, n, count)) Py_CLEAR(counts);
    }
    return counts ? Py_BuildValue("(Nd)", counts, tally.total) : NULL;
}
