/* What another router tells of its own requests, counted: extproc/routing/told.py describes it and
 * has the same in Python. */
#define PY_SSIZE_T_CLEAN
#include "told.h"

#include "numbers.h"
#include "objects.h"

enum { ID, IN_FLIGHT, BOOKED_TOKENS, SENT_TOKENS, GAUGES, NUMBERS, AHEAD_TOKENS, WORDS };

static const char *const SPELLED[WORDS] = {"worker", "in_flight", "booked_tokens", "sent_tokens",
                                           "gauges", "numbers",   "ahead_tokens"};

static PyObject *words[WORDS];

/* A router's figures of one worker. */
typedef struct {
    long long in_flight, booked_tokens, sent_tokens;
} Figures;

static bool count_of(PyObject *object, int word, long long *count) {
    PyObject *value = PyObject_GetAttr(object, words[word]);
    if (!value) return false;
    *count = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return *count != -1 || !PyErr_Occurred();
}

static bool read_figures(PyObject *gauges, Figures *figures) {
    return count_of(gauges, IN_FLIGHT, &figures->in_flight) &&
           count_of(gauges, BOOKED_TOKENS, &figures->booked_tokens) &&
           count_of(gauges, SENT_TOKENS, &figures->sent_tokens);
}

/* By how much figures grew; the tokens sent begin anew if there are fewer than before. */
static bool growth_of(const Figures *after, const Figures *before, Figures *more) {
    if (__builtin_sub_overflow(after->in_flight, before->in_flight, &more->in_flight) ||
        __builtin_sub_overflow(after->booked_tokens, before->booked_tokens,
                               &more->booked_tokens) ||
        __builtin_sub_overflow(after->sent_tokens, before->sent_tokens, &more->sent_tokens)) {
        PyErr_SetString(PyExc_OverflowError, "too many requests or tokens");
        return false;
    }
    if (more->sent_tokens < 0) more->sent_tokens = after->sent_tokens;
    return true;
}

/* Adds tokens to those that wait ahead of this router's next request. */
static bool add_ahead(PyObject *state, double more, double most) {
    PyObject *before = PyObject_GetAttr(state, words[AHEAD_TOKENS]);
    double ahead = before ? PyFloat_AsDouble(before) : -1.0;
    Py_XDECREF(before);
    if (ahead == -1.0 && PyErr_Occurred()) return false;
    PyObject *after = PyFloat_FromDouble(most < ahead + more ? most : ahead + more);
    bool is_set = after && !PyObject_SetAttr(state, words[AHEAD_TOKENS], after);
    Py_XDECREF(after);
    return is_set;
}

static bool count_growth(PyObject *state, const Figures *more, const SharingRules *rules) {
    PyObject *numbers = PyObject_GetAttr(state, words[NUMBERS]);
    double queued = (double)more->sent_tokens, most;
    bool is_counted = numbers && numbers_share_told(numbers, more->in_flight, more->booked_tokens,
                                                    queued, queued, rules, &most);
    Py_XDECREF(numbers);
    return is_counted && add_ahead(state, queued, most);
}

/* Counts a router's figures of a worker; *is_later: whether it told of that one before. False after
 * an error. */
static bool count_figures(PyObject *state, PyObject *told, PyObject *router,
                          const SharingRules *rules, bool *is_later) {
    Figures before, after, more;
    PyObject *gauges = PyObject_GetAttr(state, words[GAUGES]);
    PyObject *last = gauges ? PyDict_GetItemWithError(gauges, router) : NULL;
    *is_later = last != NULL;
    bool is_counted = last && read_figures(last, &before) && read_figures(told, &after) &&
                      growth_of(&after, &before, &more) && !PyDict_SetItem(gauges, router, told) &&
                      count_growth(state, &more, rules);
    Py_XDECREF(gauges);
    return is_counted || (!last && !PyErr_Occurred());
}

/* Returns the record of the worker that is told of, with a reference; NULL if there is none, or after
 * an error. */
static PyObject *state_of(PyObject *told, PyObject *places, PyObject *endpoints) {
    PyObject *worker = PyObject_GetAttr(told, words[ID]);
    PyObject *place = worker ? PyDict_GetItemWithError(places, worker) : NULL;
    Py_XDECREF(worker);
    if (place && !PyTuple_Check(place)) PyErr_SetString(PyExc_TypeError, "no place");
    PyObject *endpoint = place && PyTuple_Check(place) ? PyTuple_GetItem(place, 0) : NULL;
    PyObject *state = endpoint ? PyDict_GetItemWithError(endpoints, endpoint) : NULL;
    Py_XINCREF(state);
    return state;
}

/* count_later(told, places, endpoints, router, (now, rate, window, most)) */
PyObject *module_count_later(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    double each[4];
    if (!are_given(given, were, "tddoo") || !numbers_of(given[4], each, 4)) return NULL;
    SharingRules rules = {each[0], each[1], each[2], each[3]};
    PyObject *first = PyList_New(0);
    for (Py_ssize_t n = 0; first && n < PyTuple_Size(given[0]); n++) {
        PyObject *told = PyTuple_GetItem(given[0], n);
        PyObject *state = state_of(told, given[1], given[2]);
        bool is_later = false;
        bool is_sound = state ? count_figures(state, told, given[3], &rules, &is_later)
                              : !PyErr_Occurred();
        Py_XDECREF(state);
        if (!is_sound || (!is_later && PyList_Append(first, told))) Py_CLEAR(first);
    }
    return first;
}

bool told_prepare(void) {
    for (int word = 0; word < WORDS; word++) {
        words[word] = PyUnicode_InternFromString(SPELLED[word]);
        if (!words[word]) return false;
    }
    return true;
}
