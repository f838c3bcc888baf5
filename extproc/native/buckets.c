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

/* Returns (counts, total). */
static PyObject *tally_shown(const Tally *tally) {
    PyObject *counts = PyList_New(tally->bound_count + 1);
    for (Py_ssize_t n = 0; counts && n <= tally->bound_count; n++) {
        PyObject *count = PyLong_FromLongLong(tally->counts[n]);
        if (!count || PyList_SetItem(counts, n, count)) Py_CLEAR(counts);
    }
    return counts ? Py_BuildValue("(Nd)", counts, tally->total) : NULL;
}

static bool read_number(double *number, PyObject *numbers, Py_ssize_t at) {
    *number = PyFloat_AsDouble(PyTuple_GetItem(numbers, at));
    return *number != -1.0 || !PyErr_Occurred();
}

/* bucketed(bounds, starts, ends): (counts, total) of each end less its start. */
PyObject *module_bucketed(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    Tally tally;
    if (!are_given(given, were, "ttt") || !tally_read(&tally, given[0])) return NULL;
    Py_ssize_t count = PyTuple_Size(given[1]);
    if (count != PyTuple_Size(given[2])) {
        PyErr_SetString(PyExc_ValueError, "not as many ends as starts");
        return NULL;
    }
    for (Py_ssize_t n = 0; n < count; n++) {
        double start, end;
        if (!read_number(&start, given[1], n) || !read_number(&end, given[2], n)) return NULL;
        tally_observe(&tally, end - start);
    }
    return tally_shown(&tally);
}
